"""What an exchange in the background costs: exposed time of a paced run, and the pipeline's hops beside it."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import yaml
from rich.console import Console
from rich.table import Table

from testbed.network import Network
from testbed.topology import Topology, topology_from

HOP_WORKER = Path(__file__).parent / "hop_worker.py"
RTT_MS = 30
WORKER_LIMIT_S = 120
EXPOSED_TARGET = 0.02
HOP_KIB, EXCHANGE_MIB = 256, 32


def two_by_two() -> Topology:
    """Two sites of two nodes: a replica of two stages in each."""
    lan = {"rate_mbps": 10000, "rtt_ms": 0.2}
    return topology_from(
        {
            "name": "bench",
            "sites": {"north": {"nodes": 2, "lan": lan}, "south": {"nodes": 2, "lan": lan}},
            "wan": {
                "uplink": {"rate_mbps": 1000},
                "pairs": [{"between": ["north", "south"], "rtt_ms": RTT_MS}],
            },
        },
        "bench",
    )


def hops(console: Console) -> None:
    """Activations back and forth between two stages, alone and beside exchanges of both stages."""
    with (
        tempfile.TemporaryDirectory(prefix="dilocox-bench-") as scratch,
        Network(two_by_two(), expose=[Path(scratch)]) as network,
    ):
        Path(scratch).chmod(0o777)
        processes = []
        for rank, node in enumerate(network.plan.node_address):
            contract = network.contract(node, rank, 4, Path(scratch))
            command = [
                sys.executable,
                str(HOP_WORKER),
                str(HOP_KIB),
                str(EXCHANGE_MIB),
                f"{scratch}/{rank}.json",
            ]
            processes.append(
                network.nodes[node].start_program(
                    command, network.user, contract, subprocess.DEVNULL, Path.cwd()
                )
            )
        codes = [process.wait(timeout=WORKER_LIMIT_S) for process in processes]
        if any(codes):
            raise RuntimeError("a worker failed")
        found = json.loads(Path(f"{scratch}/0.json").read_text(encoding="utf-8"))
    table = Table("pipeline hop", "hops", "median ms", "p99 ms", "worst ms", "exchange s", box=None)
    for name, entry in found.items():
        hop_ms = sorted(1e3 * seconds for seconds in entry["hops"])
        table.add_row(
            *(name, str(len(hop_ms)), f"{statistics.median(hop_ms):.2f}"),
            *(f"{hop_ms[int(0.99 * len(hop_ms))]:.2f}", f"{hop_ms[-1]:.2f}"),
            f"{statistics.median(entry['exchanges']):.3f}" if entry["exchanges"] else "-",
        )
    console.print(
        f"hops of {HOP_KIB} KiB between two stages on a LAN of 10 Gbit/s; beside them both stages exchange"
        f" {EXCHANGE_MIB} MiB each\nover one uplink of 1 Gbit/s, {RTT_MS} ms"
    )
    console.print(table)


def exposed(console: Console) -> None:
    """A paced run with one-step delay and nothing compressed."""
    config = {
        "name": "bench-overlap",
        "topology": "two-sites-1gbps",
        "model": {"preset": "decoder-1m"},
        "parallel": {"replicas": 2, "stages": 2, "microbatches": 4},
        "train": {"steps": 60, "batch_size": 8},
        "method": {"name": "dilocox", "local_steps": 10, "compressor": {"name": "none"}},
        "compute": {"mode": "paced", "step_s": 0.5},
        "eval": {"every": 60, "tokens": 2048},
    }
    with tempfile.TemporaryDirectory(prefix="dilocox-bench-") as scratch:
        file, out = Path(scratch) / "run.yaml", Path(scratch) / "out"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [sys.executable, "-m", "experiments.cli", "run", str(file), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        records = list(out.rglob("record.json"))
        if not records:
            raise RuntimeError(
                done.stderr.strip().splitlines()[-1] if done.stderr else "the run left nothing"
            )
        record = json.loads(records[0].read_text(encoding="utf-8"))
        rounds = pd.read_parquet(records[0].parent / "rounds.parquet")
    hidden = rounds[rounds["round"] < rounds["round"].max()]  # nothing is left to hide the last one behind
    share = max(rank["exposed_comm_s"] / rank["wall_s"] for rank in record["ranks"])
    round_s = config["compute"]["step_s"] * config["method"]["local_steps"]
    verdict = "PASS" if hidden["exposed_comm_s"].max() / round_s < EXPOSED_TARGET else "FAIL"
    console.print(
        f"one-step delay, {record['status']}: an exchange took {hidden['comm_s'].median():.3f} s of a round of {round_s:g} s;"
        f" exposed at most {hidden['exposed_comm_s'].max():.4f} s\n= {hidden['exposed_comm_s'].max() / round_s:.2%} of the"
        f" round, {verdict} (below {EXPOSED_TARGET:.0%}); with the last, drained round {share:.2%} of the run"
    )
    if record["reason"]:
        console.print(record["reason"])


def run(console: Console) -> None:
    """Prints the table and the line."""
    hops(console)
    exposed(console)
