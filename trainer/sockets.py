"""What the kernel says this process sent, per TCP connection: a check on our own payload count."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

TCP_INFO_BYTES = 232
BYTES_ACKED_OFFSET = 120  # tcpi_bytes_acked, u64, since Linux 4.1 (include/uapi/linux/tcp.h)
_TCP = socket.IPPROTO_TCP


def kernel_sent(master_port: int) -> dict[str, dict[str, int]]:
    """Bytes that peers acknowledged, by `ip:port` of the peer, over this process's open connections.

    Returns `{"data": {...}, "control": {...}}`; control connections have `master_port` at either end.
    Sockets that are not connected TCP, or whose kernel reports less than tcpi_bytes_acked, are left out.
    """
    sent: dict[str, dict[str, int]] = {"data": {}, "control": {}}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            duplicate = os.dup(int(entry.name))
        except OSError:
            continue  # closed between listing and looking
        with socket.socket(fileno=duplicate) as connection:
            _add(connection, master_port, sent)
    return sent


def _add(connection: socket.socket, master_port: int, sent: dict[str, dict[str, int]]) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return
    try:
        peer_ip, peer_port = connection.getpeername()[:2]
        own_port = connection.getsockname()[1]
        info = connection.getsockopt(_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    except OSError:
        return  # a listening socket has no peer
    if len(info) < BYTES_ACKED_OFFSET + 8:
        return
    (bytes_acked,) = struct.unpack_from("=Q", info, BYTES_ACKED_OFFSET)
    kind = "control" if master_port in (peer_port, own_port) else "data"
    peer = f"{str(peer_ip).removeprefix('::ffff:')}:{peer_port}"
    sent[kind][peer] = sent[kind].get(peer, 0) + bytes_acked
