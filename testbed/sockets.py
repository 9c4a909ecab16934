"""What the kernel delivered, per TCP flow: ``ss -E`` reports every socket at its end, with its final counts.

``bytes_acked`` is exact payload, without headers and retransmissions; so it checks what a program *says* it
sent. Works for any program, and nothing has to be sampled.
"""

import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from testbed.network import Network
from testbed.plan import CONTROL_PORT

SETTLE_S = 0.3
_ENDPOINT = re.compile(r"\[?(?:::ffff:)?([\d.]+)\]?:(\d+)")
_ACKED = re.compile(r"\bbytes_acked:(\d+)")
_RETRANSMITTED = re.compile(r"\bbytes_retrans:(\d+)")


@dataclass(frozen=True)
class Flow:
    """One end of a TCP connection: payload bytes that this end sent and its peer acknowledged."""

    node: str
    local: str
    local_port: int
    peer: str
    peer_port: int
    acked_bytes: int
    retransmitted_bytes: int

    @property
    def is_control(self) -> bool:
        """Rendezvous traffic."""
        return CONTROL_PORT in (self.local_port, self.peer_port)


def parse_flows(node: str, text: str) -> list[Flow]:
    """Reads the output of ``ss -EtinH`` or ``ss -tinH``: a line of addresses, a line of facts for each socket."""
    flows = []
    endpoints: list[tuple[str, str]] = []
    for line in text.splitlines():
        if not line.startswith(("\t", " ")):
            endpoints = _ENDPOINT.findall(line)
            continue
        acked = _ACKED.search(line)
        if len(endpoints) == 2 and acked:
            retransmitted = _RETRANSMITTED.search(line)
            (local, local_port), (peer, peer_port) = endpoints
            flows.append(
                Flow(
                    node=node,
                    local=local,
                    local_port=int(local_port),
                    peer=peer,
                    peer_port=int(peer_port),
                    acked_bytes=int(acked[1]),
                    retransmitted_bytes=int(retransmitted[1]) if retransmitted else 0,
                )
            )
        endpoints = []
    return flows


class SocketWatch:
    """Listens in every node while programs run; ``flows()`` after they have ended."""

    def __init__(self, network: Network, folder: Path) -> None:
        self._network = network
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for node in self._network.plan.node_address:
            with (self._folder / f"{node}.txt").open("wb") as output:
                self._processes[node] = self._network.nodes[node].start_root(
                    ["stdbuf", "-oL", "ss", "-EtinH"],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()

    def flows(self) -> list[Flow]:
        """Every flow that ended, and those still open, with their final counts."""
        self._wait_until_quiet()
        flows = []
        for node in self._processes:
            ended = (self._folder / f"{node}.txt").read_text(encoding="utf-8", errors="replace")
            open_now = self._network.nodes[node].run(["ss", "-tinH"])
            flows += parse_flows(node, ended) + parse_flows(node, open_now)
        return flows

    def _wait_until_quiet(self) -> None:
        """The kernel reports asynchronously: waits until no file has grown for a moment (2 s at most)."""
        deadline = time.monotonic() + 2.0
        size = -1
        while time.monotonic() < deadline:
            now = sum(f.stat().st_size for f in self._folder.glob("*.txt"))
            if now == size:
                return
            size = now
            time.sleep(SETTLE_S)
