"""The trainer's averaging over an emulated gigabit, paired with gloo's own all-reduce in the same processes."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import links
from rich.console import Console
from rich.table import Table

from testbed.network import Network
from testbed.units import goodput_mbps

MIB = 32
RTTS_MS = (1, 50, 100)
WORKER = Path(__file__).parent / "exchange_worker.py"


def run(console: Console) -> None:
    """Prints the table."""
    table = Table("RTT ms", "exchange", "median s", "bound s", "of the bound", box=None)
    for rtt_ms in RTTS_MS:
        with (
            tempfile.TemporaryDirectory(prefix="dilocox-bench-") as scratch,
            Network(links.two_sites(rtt_ms), expose=[Path(scratch)]) as network,
        ):
            Path(scratch).chmod(0o777)
            processes = []
            for rank, node in enumerate(network.plan.node_address):
                contract = network.contract(node, rank, 2, Path(scratch))
                command = [sys.executable, str(WORKER), str(MIB), f"{scratch}/{rank}.json"]
                processes.append(
                    network.nodes[node].start_program(
                        command, network.user, contract, subprocess.DEVNULL, Path.cwd()
                    )
                )
            for process in processes:
                if process.wait(timeout=180):
                    console.print(f"RTT {rtt_ms} ms: a worker failed")
                    return
            times = json.loads(Path(f"{scratch}/0.json").read_text(encoding="utf-8"))
        # 2 (D-1)/D of the volume and one round trip for each of two dependent phases
        bound_s = MIB * 2**20 * 8 / (goodput_mbps(1000) * 1e6) + 2 * rtt_ms / 1e3
        for name, seconds in times.items():
            median = statistics.median(seconds)
            table.add_row(
                str(rtt_ms), name, f"{median:.3f}", f"{bound_s:.3f}", f"{100 * bound_s / median:.0f} %"
            )
    console.print(f"mean of {MIB} MiB fp32 over D=2, 1 Gbit/s")
    console.print(table)
