"""Packet capture of one direction of a link, by tcpdump: the packets as they leave, with the time at which they do.

tcpdump runs in immediate mode: with its usual blocks of packets, those that wait when it is asked to end are lost
without being counted. It takes them after the queueing disciplines, so a packet's time is when the link sent it. Only
headers are kept (``SNAP_BYTES``), which leaves the processor to what is being measured; packets that the
capture itself lost are told. With segmentation offload on, one captured packet may be a super-packet of many
segments: the queueing discipline counts each of them with headers of its own (docs/running-programs.md).
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from testbed.errors import TestbedError, TopologyError
from testbed.network import Network
from testbed.plan import plan_network
from testbed.topology import Topology

SNAP_BYTES = 128
"""Ethernet, IP and TCP with every option, and a little payload."""
BUFFER_KIB = 32 * 1024
"""What the kernel keeps while tcpdump waits for the processor: a second of headers at ten gigabits."""
START_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 5.0
DRAIN_STEP_S = 0.05
"""Nothing new written for so long, at the end: all is written."""
_TOLD = re.compile(
    r"(\d+) packets? captured[,\n] *\d+ packets? received by filter[,\n] *(\d+) packets? dropped by kernel"
)


def check_links(topology: Topology, links: Sequence[str]) -> None:
    """Refuses what cannot be captured, before anything is made.

    Raises:
        TopologyError: a name that no link has.
        TestbedError: tcpdump is not installed.
    """
    valid = [link.name for link in plan_network(topology).links]
    for link in links:
        if link not in valid:
            raise TopologyError(f"--pcap: found {link!r}, allowed: {', '.join(valid)}")
    if links and not shutil.which("tcpdump"):
        raise TestbedError("tcpdump is missing: apt-get install tcpdump")


def file_name(link: str) -> str:
    """The capture's file name: ``north/up`` goes to ``north-up.pcap``."""
    return f"{link.replace('/', '-')}.pcap"


class Capture:
    """A capture that runs; leaving it stops it.

    Attributes:
        path: the pcap file, which belongs to the invoking user.
        captured: packets in it, known after the end.
        lost: packets that the capture missed, known after the end.
    """

    def __init__(self, network: Network, link: str, folder: Path, snap_bytes: int = SNAP_BYTES) -> None:
        self._network, self._link, self._snap_bytes = network, network.plan.link(link), snap_bytes
        self.path = folder / file_name(link)
        self.captured: int | None = None
        self.lost: int | None = None
        self._said = network.session.folder / f"tcpdump-{self._link.owner}-{self._link.interface}.log"
        self._tcpdump: subprocess.Popen[str]

    def __enter__(self) -> Self:
        # We open the file, not tcpdump: it writes as a user of its own, and the file is the invoking user's.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        output = os.open(self.path, flags, 0o644)
        os.fchown(output, int(os.environ.get("SUDO_UID", "0")), int(os.environ.get("SUDO_GID", "0")))
        with os.fdopen(output, "wb") as file, self._said.open("wb") as said:
            self._tcpdump = self._network.nodes[self._link.owner].start_root(
                ["tcpdump", "-i", self._link.interface, "-n", "-w", "-", "--immediate-mode"]
                + ["-s", str(self._snap_bytes), "-B", str(BUFFER_KIB), "outbound"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=said,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while "listening on" not in self._messages():
            if self._tcpdump.poll() is not None or time.monotonic() > deadline:
                self._tcpdump.kill()
                self._tcpdump.wait()
                raise TestbedError(f"link {self._link.name}: tcpdump did not start: {self._messages()}")
            time.sleep(0.01)
        return self

    def _messages(self) -> str:
        return self._said.read_text(encoding="utf-8", errors="replace").strip()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drain()
        try:
            self._tcpdump.send_signal(signal.SIGINT)
            self._tcpdump.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._tcpdump.kill()
            self._tcpdump.wait()
        if self._tcpdump.returncode == 0 and self._counts():
            self.captured, self.lost = self._counts()[-1]

    def _counts(self) -> list[tuple[int, int]]:
        """(written, dropped by the kernel before) each time that tcpdump told."""
        return [(int(written), int(dropped)) for written, dropped in _TOLD.findall(self._messages())]

    def _ask(self) -> int:
        """How many packets tcpdump has written by now."""
        told = len(self._counts())
        self._tcpdump.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while len(self._counts()) == told and self._tcpdump.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return (self._counts() or [(0, 0)])[-1][0]

    def _drain(self) -> None:
        """Waits until tcpdump has written all that the kernel holds for it: its end would lose that."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        written = -1
        while self._tcpdump.poll() is None and time.monotonic() < deadline:
            before, written = written, self._ask()
            if before == written:
                return
            time.sleep(DRAIN_STEP_S)

    def sentence(self) -> str:
        """What there is now, and what is missing from it."""
        if self.captured is None or self.lost is None:
            return f"link {self._link.name}: {self.path} is cut short: tcpdump did not end as it should"
        lost = f"{self.lost} were lost by the capture" if self.lost else "none was lost by the capture"
        return f"link {self._link.name}: {self.captured} packets in {self.path}, {lost}"

    def row(self) -> dict[str, Any]:
        """As plain data for the record."""
        return {
            "link": self._link.name,
            "file": self.path.name,
            "snap_bytes": self._snap_bytes,
            "packets": self.captured,
            "lost_packets": self.lost,
        }


@contextlib.contextmanager
def capturing(network: Network, links: Sequence[str], folder: Path) -> Iterator[list[Capture]]:
    """Captures links into a folder; what came of it is known when the context is left."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Capture(network, link, folder)) for link in dict.fromkeys(links)]
