"""Runs any program on the nodes of a topology, with prefixed output: what ``dilocox exec`` does."""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from experiments.runner import interruptible
from testbed.launch import describe_exit
from testbed.network import Network
from testbed.topology import Topology


def _forward(node: str, process: "subprocess.Popen[str]", lock: threading.Lock) -> None:
    if process.stdout is None:
        return
    for line in process.stdout:
        with lock:
            sys.stdout.write(f"{node}: {line if line.endswith(chr(10)) else line + chr(10)}")
            sys.stdout.flush()


def execute(topology: Topology, command: list[str], nodes: list[str], limit_s: float) -> int:
    """Starts ``command`` on the nodes at once and waits for all; returns the worst exit status.

    A program ended by a signal counts as 128 + its number, one that overruns ``limit_s`` as 124.
    """
    folder = Path.cwd().resolve()
    lock = threading.Lock()
    statuses = []
    with (
        interruptible(),
        tempfile.TemporaryDirectory(prefix="dilocox-exec-") as scratch,
        Network(topology, expose=[folder, Path(scratch)]) as network,
    ):
        Path(scratch).chmod(0o777)  # the programs' user writes here
        processes = {}
        for rank, node in enumerate(topology.nodes):
            if node in nodes:
                contract = network.contract(node, rank, len(topology.nodes), Path(scratch))
                processes[node] = network.nodes[node].start_program(
                    command, network.user, contract, subprocess.PIPE, folder
                )
        threads = [
            threading.Thread(target=_forward, args=(node, process, lock), daemon=True)
            for node, process in processes.items()
        ]
        for thread in threads:
            thread.start()
        for node, process in processes.items():
            try:
                status = process.wait(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                status = 124
            statuses.append(128 - status if status < 0 else status)
            if status:
                sys.stderr.write(f"{node}: {describe_exit(status)}\n")
        for thread in threads:
            thread.join(timeout=2)
    return max(statuses, default=0)
