"""The trainer's averaging over emulated gigabits, paired with gloo's own all-reduce in the same processes."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from testbed.network import Network
from testbed.topology import Topology, topology_from
from testbed.units import goodput_mbps

CASES = [
    (2, 1, 32),
    (2, 1, 64),
    (2, 50, 32),
    (2, 50, 64),
    (2, 100, 32),
    (2, 100, 64),
    (4, 1, 32),
    (4, 50, 32),
    (4, 100, 32),
]
"""(replicas, RTT ms, MiB of fp32)."""

REPEATS = 5
WORKER = Path(__file__).parent / "exchange_worker.py"
RATE_MBPS = 1000.0
WORKER_LIMIT_S = 120


def target(rtt_ms: float) -> float:
    """The share of the bound that counts as the speed of the link: latency leaves more to chance."""
    return 0.95 if rtt_ms < 10 else 0.85


def congestion_control(rtt_ms: float) -> str:
    """Of the emulated network, for ours and for gloo: what suits the distance (docs/LOG.md)."""
    return "cubic" if rtt_ms < 10 else "bbr"


def volume_bytes(replicas: int, mib: int) -> float:
    """What each rank sends, and receives: 2 (D-1)/D of the tensor."""
    return mib * 2**20 * 2 * (replicas - 1) / replicas


def bound_s(replicas: int, rtt_ms: float, mib: int) -> float:
    """Volume at the link's goodput, and one round trip for each dependent phase: one between two, else two."""
    phases = 1 if replicas == 2 else 2
    return volume_bytes(replicas, mib) * 8 / (goodput_mbps(RATE_MBPS) * 1e6) + phases * rtt_ms / 1e3


def sites(count: int, rtt_ms: float) -> Topology:
    """`count` sites of one node, every pair equally far."""
    names = [f"site{i}" for i in range(count)]
    pairs = [{"between": [a, b], "rtt_ms": rtt_ms} for i, a in enumerate(names) for b in names[i + 1 :]]
    return topology_from(
        {
            "name": "bench",
            "sites": {name: {"nodes": 1} for name in names},
            "wan": {"uplink": {"rate_mbps": RATE_MBPS}, "pairs": pairs},
            "tcp": {"congestion_control": congestion_control(rtt_ms)},
        },
        "bench",
    )


def measure(replicas: int, rtt_ms: float, mib: int) -> dict[str, Any]:
    """What rank 0 wrote, its times replaced by the slowest rank's of each turn.

    Raises:
        RuntimeError: a worker failed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="dilocox-bench-") as scratch,
        Network(sites(replicas, rtt_ms), expose=[Path(scratch)]) as network,
    ):
        Path(scratch).chmod(0o777)
        processes = []
        for rank, node in enumerate(network.plan.node_address):
            contract = network.contract(node, rank, replicas, Path(scratch))
            command = [sys.executable, str(WORKER), str(mib), str(REPEATS), f"{scratch}/{rank}.json"]
            processes.append(
                network.nodes[node].start_program(
                    command, network.user, contract, subprocess.DEVNULL, Path.cwd()
                )
            )
        codes = [process.wait(timeout=WORKER_LIMIT_S) for process in processes]
        if any(codes):
            raise RuntimeError("a worker failed")
        files = [Path(f"{scratch}/{rank}.json") for rank in range(replicas)]
        ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    found: dict[str, Any] = dict(ranks[0])
    for name in ("tuned", "naive"):
        found[name] = [max(turn) for turn in zip(*(rank[name] for rank in ranks), strict=True)]
    found["retransmitted"] = sum(rank["retransmitted"] for rank in ranks)
    return found


def run(console: Console) -> None:
    """Prints the table."""
    table = Table(
        *("D", "RTT ms", "MiB", "bound s", "ours s", "of bound", "bus Mbit/s", "cold s", "resent"),
        *("gloo s", "of bound", "TCP", "target"),
        box=None,
    )
    for replicas, rtt_ms, mib in CASES:
        found = measure(replicas, rtt_ms, mib)
        bound = bound_s(replicas, rtt_ms, mib)
        ours, naive = statistics.median(found["tuned"][1:]), statistics.median(found["naive"][1:])
        verdict = "PASS" if bound / ours >= target(rtt_ms) else "FAIL"
        table.add_row(
            *(str(replicas), str(rtt_ms), str(mib), f"{bound:.3f}", f"{ours:.3f}", f"{bound / ours:.0%}"),
            f"{volume_bytes(replicas, mib) * 8 / ours / 1e6:.0f}",
            *(f"{found['tuned'][0]:.2f}", str(found["retransmitted"])),
            *(f"{naive:.3f}", f"{bound / naive:.0%}", congestion_control(rtt_ms)),
            f"{verdict} ({target(rtt_ms):.0%})",
        )
    console.print(f"mean of fp32 over D sites of one node, 1 Gbit/s; medians of {REPEATS} warm repetitions")
    console.print(table)
    console.print(
        "bound: 2 (D-1)/D of the tensor at 956.4 Mbit/s + 1 RTT (D=2) or 2 RTTs; bus: that volume / time;\n"
        "cold: the first exchange on new connections, whose windows are still small; resent: TCP segments, all ranks"
    )
