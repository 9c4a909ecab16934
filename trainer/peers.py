"""Who the members of a group are, and what is said when one of them is lost."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass

SIOCGIFADDR = 0x8915  # include/uapi/linux/sockios.h
INTERFACE_NAME_BYTES = 15


class PeerLost(RuntimeError):
    """A member of the group is gone or silent; the message names its rank and node."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class MismatchError(RuntimeError):
    """Two members are not doing the same exchange."""


@dataclass(frozen=True)
class Peer:
    """How one member is reached and named; `token` proves that a connection belongs to this group."""

    rank: int
    node: str
    host: str
    port: int
    token: str

    def to_json(self) -> str:
        """For the rendezvous store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Peer:
        """As another member wrote it."""
        return cls(**json.loads(text))

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.node}, {self.host})"


def own_address(environment: Mapping[str, str] = os.environ) -> str:
    """The address that peers can reach: GLOO_SOCKET_IFNAME's, else the one that faces MASTER_ADDR.

    Raises:
        OSError: the interface has no IPv4 address, or MASTER_ADDR does not resolve.
    """
    if interface := environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:INTERFACE_NAME_BYTES])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # chooses a route; sends nothing
        return str(probe.getsockname()[0])
