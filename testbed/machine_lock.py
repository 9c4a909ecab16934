"""One emulated run at a time: two on one machine would falsify each other.

The lock is an abstract Unix socket: the kernel frees it with its holder, whatever ended that, and tells who the
holder is. Nothing is left on the disk.
"""

import socket
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

from testbed.errors import TestbedError

NAME = "\0dilocox-emulated-run"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of struct ucred


class MachineLock:
    """Held while a run is emulated.

    Raises:
        TestbedError: on entering, when another process holds it; the sentence names that process.
    """

    def __init__(self, name: str = NAME) -> None:
        self._name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __enter__(self) -> Self:
        try:
            self._socket.bind(self._name)
            self._socket.listen(1)
        except OSError as error:
            self._socket.close()
            raise TestbedError(
                f"another emulated run is using this machine ({holder(self._name)}): two at once would falsify"
                " each other; allowed is to wait for its end"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()


def holder(name: str = NAME) -> str:
    """Process id and command line of whoever holds the lock."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(name)
            raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return "it has just ended"
    pid = _CREDENTIALS.unpack(raw)[0]
    try:
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    except OSError:
        command = "command unknown"
    return f"process {pid}: {command}"
