"""Connections between all members of a group, made over the rendezvous store."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.peers import Peer, PeerLost, own_address

HELLO = struct.Struct("!32sHH")
"""Token, member index, number of the connection."""


@dataclass(frozen=True)
class Connections:
    """`sockets[peer index]` in the order of their numbers; `peers` holds everybody, this member too."""

    peers: list[Peer]
    sockets: dict[int, list[socket.socket]]


def connect_all(store: Store, index: int, ranks: list[int], count: int, timeout_s: float) -> Connections:
    """Open `count` connections to each of the others; collective over the group's members.

    Args:
        store: a prefix of its own for this group; addresses go through it.
        index: this member's place in `ranks`.
        ranks: the members' global ranks, for messages.
        count: connections per peer.
        timeout_s: for everything together.

    Raises:
        PeerLost: a member did not come in time; the message names it.
        OSError: this process's own address cannot be found or bound.
    """
    deadline = time.monotonic() + timeout_s
    host = own_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets: dict[int, list[socket.socket]] = {}
    with socket.create_server((host, 0), family=family, backlog=count * len(ranks)) as listener:
        me = Peer(
            ranks[index],
            os.environ.get("TESTBED_NODE") or socket.gethostname(),
            host,
            listener.getsockname()[1],
            secrets.token_hex(16),
        )
        store.set(str(index), me.to_json())
        peers = [_look_up(store, i, rank, deadline) for i, rank in enumerate(ranks)]
        for other in range(index):
            sockets[other] = [_call(peers[other], index, n, deadline) for n in range(count)]
        later = {(other, n) for other in range(index + 1, len(ranks)) for n in range(count)}
        accepted = _accept(listener, me.token, later, peers, deadline)
    for other in range(index + 1, len(ranks)):
        sockets[other] = [accepted[other, n] for n in range(count)]
    for connections in sockets.values():
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(timeout_s * 1e3)))
    return Connections(peers, sockets)


def _left_s(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())


def _look_up(store: Store, index: int, rank: int, deadline: float) -> Peer:
    try:
        store.wait([str(index)], timedelta(seconds=_left_s(deadline)))
        return Peer.from_json(store.get(str(index)))
    except RuntimeError as error:
        raise PeerLost(rank, f"rank {rank} did not come to the rendezvous: {error}") from error


def _call(peer: Peer, index: int, number: int, deadline: float) -> socket.socket:
    try:
        connection = socket.create_connection((peer.host, peer.port), timeout=_left_s(deadline))
        connection.sendall(HELLO.pack(peer.token.encode(), index, number))
    except OSError as error:
        raise PeerLost(peer.rank, f"{peer} cannot be connected at port {peer.port}: {error}") from error
    return connection


def _accept(
    listener: socket.socket, token: str, missing: set[tuple[int, int]], peers: list[Peer], deadline: float
) -> dict[tuple[int, int], socket.socket]:
    accepted: dict[tuple[int, int], socket.socket] = {}
    while missing:
        listener.settimeout(_left_s(deadline))
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            late = peers[min(missing)[0]]
            raise PeerLost(late.rank, f"{late} did not connect in time") from error
        key = _read_hello(connection, token, deadline)
        if key in missing:
            missing.remove(key)
            accepted[key] = connection
        else:
            connection.close()  # a stranger
    return accepted


def _read_hello(connection: socket.socket, token: str, deadline: float) -> tuple[int, int] | None:
    connection.settimeout(min(5.0, _left_s(deadline)))
    try:
        hello = connection.recv(HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(hello) < HELLO.size:
        return None
    sent, index, number = HELLO.unpack(hello)
    return (index, number) if secrets.compare_digest(sent, token.encode()) else None
