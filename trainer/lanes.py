"""One TCP connection to a peer: frames of a fixed header and a piece of the payload, never blocking."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from trainer.transfer import PIECE_BYTES

HEADER = struct.Struct("!IIQQ")
"""Turn (how many exchanges these two had before), phase, first byte, length of the whole row."""

LOW_WATER_BYTES = 128 * 1024
"""A reader is woken for so much at once: a wake-up costs more than the copy of a packet."""


@dataclass(frozen=True)
class Header:
    """Whose bytes follow, and where they belong."""

    turn: int
    phase: int
    start: int
    total: int

    @property
    def length(self) -> int:
        """Of the piece that follows."""
        return min(PIECE_BYTES, self.total - self.start)


class Lane:
    """Sends and receives frames on a connected socket; partial frames are kept until it is ready again."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.socket = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.outgoing: list[memoryview] = []
        self.header: Header | None = None  # of the piece that is being received
        self._head = memoryview(bytearray(HEADER.size))
        self._rest = self._head
        self._low_water = 1

    @property
    def congestion_control(self) -> str:
        """What the kernel uses on this connection: the system's choice, or the route's; never ours."""
        raw = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        return raw.rstrip(b"\0").decode("ascii")

    def load(self, header: Header, piece: memoryview) -> None:
        """The frame to send next; the last one must be through."""
        packed = HEADER.pack(header.turn, header.phase, header.start, header.total)
        self.outgoing = [memoryview(packed), piece]

    def send(self) -> bool:
        """Hand over what the socket takes; whether that was the whole frame.

        Raises:
            OSError: the connection broke.
        """
        while self.outgoing:
            try:
                sent = self.socket.sendmsg(self.outgoing)
            except BlockingIOError:
                return False
            while self.outgoing and sent >= len(self.outgoing[0]):
                sent -= len(self.outgoing.pop(0))
            if sent:
                self.outgoing[0] = self.outgoing[0][sent:]
        return True

    def receive(self, place: Callable[[Header], memoryview | None]) -> Header | None:
        """Take in what has come; the header of a piece that is now complete, None if nothing is left to read.

        `place` says where a piece belongs, None if it must wait: then nothing is read until `resume`.

        Raises:
            ConnectionError: the peer closed, or the connection broke.
        """
        while True:
            if not self._rest:
                if self.header is None:
                    self.header = Header(*HEADER.unpack(self._head))
                    if not self.resume(place):
                        return None
                else:
                    done, self.header, self._rest = self.header, None, self._head
                    self._set_low_water(min(self._low_water, HEADER.size))  # for the next header
                    return done
            try:
                got = self.socket.recv_into(self._rest)
            except BlockingIOError:
                self._set_low_water(min(len(self._rest), LOW_WATER_BYTES))
                return None
            if not got:
                raise ConnectionError("closed its connection")
            self._rest = self._rest[got:]

    def resume(self, place: Callable[[Header], memoryview | None]) -> bool:
        """Ask again where the piece belongs whose header has come; False if it must wait."""
        if self.header is None or self._rest:
            return True
        target = place(self.header)
        if target is None:
            return False
        self._rest = target
        return True

    @property
    def waits(self) -> bool:
        """Whether a header has come whose piece has no place yet."""
        return self.header is not None and not self._rest

    def _set_low_water(self, wanted: int) -> None:
        if wanted != self._low_water:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            self._low_water = wanted
