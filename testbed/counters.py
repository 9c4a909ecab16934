"""Bytes, packets and drops of every link, read from the kernel's queueing disciplines.

The qdisc counts true layer-2 bytes: every segment of a super-packet with its own headers. Interface counters
(/sys/class/net) count those headers once per super-packet and come out 4 % too low. Counters vanish with the
device, so they are read before teardown.

One ``tc -batch`` process per namespace stays open; a reading costs a write and a read, no exec.
"""

import json
import select
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from testbed.attach import Attached, Place
from testbed.errors import TestbedError
from testbed.network import Network
from testbed.nodes.namespace import NamespaceNode
from testbed.plan import Link
from testbed.shaping.rate import CONTROL_CLASS

READ_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Reading:
    """A link's cumulative counters at ``t`` (seconds on the monotonic clock)."""

    t: float
    link: str
    tx_bytes: int
    tx_packets: int
    dropped: int
    backlog: int
    control_bytes: int
    direct_packets: int  # packets that no class shaped: anything but 0 means an unshaped link

    def row(self, t0: float) -> dict[str, Any]:
        """As a row of links.parquet, ``t`` in seconds since ``t0``."""
        return {**asdict(self), "t": self.t - t0}


class Counters:
    """Reads the counters of every link of a network that is up, our own or one that another process holds."""

    def __init__(self, network: Network | Attached) -> None:
        self._links: dict[str, dict[str, Link]] = {}
        links = network.plan.links if isinstance(network, Network) else network.links
        for link in links:
            self._links.setdefault(link.owner, {})[link.interface] = link
        self._places: Mapping[str, Place | NamespaceNode] = (
            network.nodes if isinstance(network, Network) else network.places
        )
        self._tc: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        for owner in self._links:
            self._tc[owner] = self._places[owner].start_root(
                ["stdbuf", "-oL", "tc", "-s", "-j", "-batch", "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._tc.values():
            process.kill()
            process.communicate()
        self._tc.clear()

    def read(self) -> dict[str, Reading]:
        """Link name -> its counters now."""
        for owner, process in self._tc.items():
            try:
                _stdin(process).write("qdisc show\n")
            except BrokenPipeError as error:
                raise TestbedError(f"the counters of {owner} died") from error
        readings = {}
        for owner, process in self._tc.items():
            qdiscs = json.loads(_line(owner, process))
            t = time.monotonic()
            for interface, link in self._links[owner].items():
                mine = [q for q in qdiscs if q["dev"] == interface]
                root = next(q for q in mine if q.get("root"))
                control = [q for q in mine if q.get("parent") == f"1:{CONTROL_CLASS:x}"]
                readings[link.name] = Reading(
                    t=t,
                    link=link.name,
                    tx_bytes=root["bytes"],
                    tx_packets=root["packets"],
                    dropped=root["drops"],
                    backlog=root["backlog"],
                    control_bytes=sum(q["bytes"] for q in control),
                    direct_packets=root["options"].get("direct_packets_stat", 0),
                )
        return readings


def _stdin(process: "subprocess.Popen[str]") -> Any:
    return process.stdin


def _line(owner: str, process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None  # noqa: S101 - opened as a pipe above
    ready, _, _ = select.select([process.stdout], [], [], READ_TIMEOUT_S)
    line = process.stdout.readline() if ready else ""
    if not line:
        raise TestbedError(f"the counters of {owner} gave no answer within {READ_TIMEOUT_S:g} s")
    return line
