"""One exchange on its way: which bytes are owed, which may go, and one loop over all connections."""

from __future__ import annotations

import select
import socket
from collections import deque
from typing import Protocol

from torch import Tensor

from trainer.lanes import Header, Lane
from trainer.peers import MismatchError, Peer, PeerLost
from trainer.transfer import PIECE_BYTES, Phase, pieces

PIECES_AT_ONCE = 8
"""From one connection before the others have their turn."""


class Links(Protocol):
    """What a turn needs of the links that it runs on."""

    timeout_s: float
    peers: list[Peer]
    lanes: list[Lane]
    notices: dict[int, socket.socket]
    turns: dict[int, int]

    def notice_of(self, peer: int) -> PeerLost | None:
        """What `peer` says about another one's loss, if it does."""

    def explain(self, peer: int, what: str) -> PeerLost:
        """Who is to blame when `peer` fails with `what`."""


class Turn:
    """One exchange on its way."""

    def __init__(self, links: Links, phases: list[Phase]) -> None:
        self.links = links
        self.phases = phases
        self.peers = sorted({peer for phase in phases for peer in (*phase.sends, *phase.receives)})
        self.numbers = {peer: links.turns[peer] for peer in self.peers}
        for peer in self.peers:
            links.turns[peer] += 1
        self.lanes = {lane.socket.fileno(): lane for lane in links.lanes if lane.peer in self.numbers}
        self.notices = {links.notices[peer].fileno(): peer for peer in self.peers}
        self.queues: dict[int, deque[tuple[int, int]]] = {peer: deque() for peer in self.peers}
        self.outgoing = [{p: _bytes_of(row) for p, row in phase.sends.items()} for phase in phases]
        self.incoming = [{p: _bytes_of(row) for p, row in phase.receives.items()} for phase in phases]
        self.owed = [{p: len(row) for p, row in rows.items()} for rows in self.incoming]
        self.missing: list[dict[int, int]] = [
            {start: len(phase.receives) for start, _ in pieces(phase.received_bytes())}
            if phase.arrived is not None
            else {}
            for phase in phases
        ]
        self.interest: dict[int, int] = {}
        self.left: set[Lane] = set()  # closed by a peer that owes nothing more
        self.epoll = select.epoll()

    def run(self) -> None:
        """Until nothing is owed and nothing is left to hand over."""
        for number, phase in enumerate(self.phases):
            if number == 0 or not self.missing[number - 1]:
                self._release(number, 0, max((row.numel() for row in phase.sends.values()), default=0))
        try:
            for descriptor in self.notices:
                self.epoll.register(descriptor, select.EPOLLIN)
            for lane in self.lanes.values():
                self._receive(lane)  # what came before we did may release pieces to any peer
            self._serve([])
            while not self._done():
                self._serve(self._ready())
        finally:
            self.epoll.close()

    def _ready(self) -> list[tuple[int, int]]:
        """Connections that can move something now; every wait has this limit."""
        ready = self.epoll.poll(self.links.timeout_s)
        if not ready:
            raise self._silence()
        return ready

    def _serve(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, events in ready:
            if descriptor in self.notices:
                self._notice(descriptor)
                continue
            lane = self.lanes[descriptor]
            if events & ~select.EPOLLOUT:
                self._receive(lane)
            if events & select.EPOLLOUT:
                self._send(lane)
        for descriptor, lane in self.lanes.items():
            if not lane.outgoing:
                self._send(lane)  # what a piece that came has released
            self._watch(descriptor, lane)

    def _done(self) -> bool:
        return (
            not any(any(owed.values()) for owed in self.owed)
            and not any(self.queues.values())
            and not any(lane.outgoing for lane in self.lanes.values())
        )

    def _watch(self, descriptor: int, lane: Lane) -> None:
        """Ask for the events that this lane can use now; for none at all if it has none."""
        wanted = 0 if lane.waits or lane in self.left else select.EPOLLIN
        wanted |= select.EPOLLOUT if lane.outgoing else 0
        had = self.interest.get(descriptor, 0)
        if wanted == had:
            return
        self.interest[descriptor] = wanted
        if not wanted:
            self.epoll.unregister(descriptor)
        elif had:
            self.epoll.modify(descriptor, wanted)
        else:
            self.epoll.register(descriptor, wanted)

    def _notice(self, descriptor: int) -> None:
        """A peer says who is lost, or closed: then its lanes end too, after what it sent has come."""
        peer = self.notices[descriptor]
        if lost := self.links.notice_of(peer):
            raise lost
        self.epoll.unregister(descriptor)

    def _open(self, peer: int) -> bool:
        """Whether bytes from or to this peer are still missing."""
        return (
            any(owed.get(peer) for owed in self.owed)
            or bool(self.queues[peer])
            or any(lane.outgoing for lane in self.lanes.values() if lane.peer == peer)
            or any(self.missing[n] for n, rows in enumerate(self.outgoing[1:]) if rows.get(peer))
        )

    def _release(self, phase: int, start: int, stop: int) -> None:
        """Let the bytes [start, stop) of a phase's rows go."""
        for first in range(start, stop, PIECE_BYTES):
            for peer, row in self.outgoing[phase].items():
                if first < len(row):
                    self.queues[peer].append((phase, first))

    def _send(self, lane: Lane) -> None:
        queue = self.queues[lane.peer]
        try:
            while lane.send() and queue:
                phase, start = queue.popleft()
                row = self.outgoing[phase][lane.peer]
                header = Header(self.numbers[lane.peer], phase, start, len(row))
                lane.load(header, row[start : start + header.length])
        except OSError as error:
            raise self.links.explain(lane.peer, f"broke its connection: {error.strerror}") from error

    def _receive(self, lane: Lane) -> None:
        def place(header: Header) -> memoryview | None:
            return self._place(lane.peer, header)

        if lane.waits and not lane.resume(place):
            return
        try:
            for _ in range(PIECES_AT_ONCE):
                header = lane.receive(place)
                if header is None:
                    break
                self._arrived(lane.peer, header)
        except OSError as error:
            if self._open(lane.peer):
                why = f"broke its connection: {error.strerror}" if error.strerror else str(error)
                raise self.links.explain(lane.peer, why) from error
            self.left.add(lane)

    def _place(self, peer: int, header: Header) -> memoryview | None:
        if header.turn > self.numbers[peer]:
            return None  # the peer is one exchange ahead
        known = header.turn == self.numbers[peer] and header.phase < len(self.phases)
        row = self.incoming[header.phase].get(peer) if known else None
        if row is None or len(row) != header.total or header.start >= header.total:
            wanted = f"{len(row)} bytes" if row is not None else "nothing"
            raise MismatchError(
                f"{self.links.peers[peer]} sends {header.total} bytes of phase {header.phase} of exchange "
                f"{header.turn}, allowed {wanted} in exchange {self.numbers[peer]}: the ranks disagree about "
                f"what is exchanged"
            )
        return row[header.start : header.start + header.length]

    def _arrived(self, peer: int, header: Header) -> None:
        number, start = header.phase, header.start
        self.owed[number][peer] -= header.length
        missing, arrived = self.missing[number], self.phases[number].arrived
        if arrived is None:
            return
        missing[start] -= 1
        if missing[start]:
            return
        del missing[start]
        arrived(start, start + header.length)
        if number + 1 < len(self.phases):
            self._release(number + 1, start, start + header.length)

    def _silence(self) -> PeerLost:
        """Blames who owes bytes of the earliest phase: later ones may wait for those."""
        links = self.links
        for owed in self.owed:
            late = [peer for peer in self.peers if owed.get(peer)]
            if late:
                break
        else:
            late = [peer for peer in self.peers if self.queues[peer]] or self.peers
        names = ", ".join(str(links.peers[peer]) for peer in late)
        return PeerLost(links.peers[late[0]].rank, f"{names} moved no byte for {links.timeout_s:g} s")


def _bytes_of(row: Tensor) -> memoryview:
    return memoryview(row.numpy().data).cast("B") if row.numel() else memoryview(b"")
