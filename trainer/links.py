"""The transport between stage peers: plain TCP at the speed of a long, fat link.

Why not gloo: it answers each message before the next, so that over 50 to 100 ms a third to a seventh of a
gigabit is left, and it copies. Here the pieces of all phases flow back to back over open connections, straight
out of and into tensor memory; the next phase starts with a piece as soon as that piece is there. One thread
serves all connections of an exchange, so nothing needs a lock and every wait has the same limit.
"""

from __future__ import annotations

import select
import struct
import threading

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from trainer.lanes import HEADER, Lane
from trainer.peers import Peer, PeerLost
from trainer.rendezvous import HELLO, connect_all
from trainer.transfer import PIECE_BYTES, Phase
from trainer.turn import Turn

LANES = 2
"""Data connections per peer: one alone loses most when its window is halved."""

NOTICE = struct.Struct("!H")
"""Member index of who is lost, followed by nothing: sent once, before leaving."""

NOTICE_WAIT_S = 1.0
"""How long a closed connection is given to say why: a notice was sent before the closing, by another way."""


class PeerLinks:
    """Connections to all members of a group; one exchange at a time, further streams for more.

    The first connection of each pair carries only notices of loss, so that whoever is told that a third
    member is gone does not blame the one that left because of it.
    """

    def __init__(
        self, store: Store, index: int, ranks: list[int], timeout_s: float, lanes: int = LANES
    ) -> None:
        """Collective over the members; see `connect_all` for what is raised."""
        self.index, self.size = index, len(ranks)
        self.timeout_s, self.lanes_per_peer = timeout_s, lanes
        self._store, self._ranks = store, ranks
        opened = connect_all(PrefixStore("addresses", store), index, ranks, 1 + lanes, timeout_s)
        self.peers: list[Peer] = opened.peers
        self.notices = {peer: connections[0] for peer, connections in opened.sockets.items()}
        self.lanes = [Lane(peer, c) for peer, connections in opened.sockets.items() for c in connections[1:]]
        for connection in self.notices.values():
            connection.setblocking(False)
        self.turns = dict.fromkeys(opened.sockets, 0)
        self.broken: Exception | None = None
        self._busy = threading.Lock()
        self._streams: list[PeerLinks] = []

    @property
    def handshake_bytes(self) -> int:
        """What this member sent to open its connections."""
        return self.index * (1 + self.lanes_per_peer) * HELLO.size

    @property
    def congestion_control(self) -> list[str]:
        """Of all data connections, each name once."""
        return sorted({lane.congestion_control for lane in self.lanes})

    def framing_bytes(self, phases: list[Phase]) -> int:
        """One header a piece, exactly."""
        rows = [row.numel() for phase in phases for row in phase.sends.values()]
        return HEADER.size * sum(-(-total // PIECE_BYTES) for total in rows)

    def stream(self, name: str) -> PeerLinks:
        """Further connections between the same members; collective, best done before training.

        Two streams may be in use at once, by two threads; they share the wire, not their order.
        """
        store = PrefixStore(f"stream/{name}", self._store)
        links = PeerLinks(store, self.index, self._ranks, self.timeout_s, self.lanes_per_peer)
        self._streams.append(links)
        return links

    def run(self, phases: list[Phase]) -> None:
        """Move all bytes of all phases; the members named in them must do the same.

        Raises:
            PeerLost: a peer closed, broke or moved nothing for `timeout_s`, or another said that one did.
            MismatchError: a peer is doing another exchange.
            RuntimeError: another exchange is in flight on these links.
        """
        if self.broken is not None:
            raise self.broken
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("an exchange is in flight on these links; use a stream of its own for another")
        try:
            Turn(self, phases).run()
        except PeerLost as error:
            self.broken = error
            self._tell_others(error)
            raise
        except BaseException as error:
            self.broken = RuntimeError(f"an earlier exchange failed half-way: {error}")
            raise
        finally:
            self._busy.release()

    def _tell_others(self, error: PeerLost) -> None:
        lost = self._ranks.index(error.rank)
        for peer, connection in self.notices.items():
            if peer != lost:
                try:
                    connection.send(NOTICE.pack(lost))
                except OSError:
                    continue  # gone too

    def explain(self, peer: int, what: str) -> PeerLost:
        """Who is to blame when `peer` fails with `what`: whom its notice names, else the peer itself."""
        return self.notice_of(peer, NOTICE_WAIT_S) or PeerLost(
            self.peers[peer].rank, f"{self.peers[peer]} {what}"
        )

    def notice_of(self, peer: int, wait_s: float = 0.0) -> PeerLost | None:
        """What `peer` says about another one's loss, if it does within `wait_s`."""
        connection = self.notices[peer]
        if not select.select([connection], [], [], wait_s)[0]:
            return None
        try:
            said = connection.recv(NOTICE.size)
        except OSError:
            return None
        lost = NOTICE.unpack(said)[0] if len(said) == NOTICE.size else self.index
        if lost == self.index or lost >= self.size:
            return None  # closed; or it lost us, which its closing shows as well
        return PeerLost(self.peers[lost].rank, f"{self.peers[lost]} is lost, says {self.peers[peer]}")

    def close(self) -> None:
        """Close every connection, those of streams too."""
        for links in self._streams:
            links.close()
        for connection in [*self.notices.values(), *(lane.socket for lane in self.lanes)]:
            connection.close()
