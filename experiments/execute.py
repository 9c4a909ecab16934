"""Runs any program on the nodes of a topology, with prefixed output: what ``dilocox exec`` does."""

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from experiments.runner import interruptible
from testbed.capture import capturing, check_links
from testbed.errors import TestbedError
from testbed.events.conductor import Conductor, Happened
from testbed.launch import Program, describe_exit
from testbed.network import Network
from testbed.programs import Programs
from testbed.topology import Topology

RESTART_POLL_S = 0.05
TIMED_OUT = 124
"""What ``timeout`` of coreutils returns for a program that overran its limit."""


def _forward(node: str, process: "subprocess.Popen[str]", lock: threading.Lock) -> None:
    if process.stdout is None:
        return
    for line in process.stdout:
        with lock:
            sys.stdout.write(f"{node}: {line if line.endswith(chr(10)) else line + chr(10)}")
            sys.stdout.flush()


def tell(one: Happened) -> None:
    """Says what happened, beside what the programs say."""
    sys.stderr.write(f"{one}\n")


def _contract(network: Network, nodes: list[str], scratch: Path) -> dict[str, dict[str, str]]:
    """The ``env://`` variables of the nodes that take part: they alone are counted, the first of them leads."""
    master = network.plan.node_address[nodes[0]]
    return {
        node: {
            **network.contract(node, rank, len(nodes), scratch),
            "MASTER_ADDR": master,
            "PYTHONUNBUFFERED": "1",  # into a pipe Python writes by blocks: nothing would be seen until the end
        }
        for rank, node in enumerate(nodes)
    }


def _wait(program: Program, deadline: float) -> int:
    """A program's status as a shell tells it; 124 for one that is still there at the deadline; 0 for one that died
    because an event asked for it.
    """
    node = program.node
    while True:
        process = program.process
        try:
            status = process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            sys.stderr.write(f"{node}: did not end within its limit\n")
            return TIMED_OUT
        if program.process is process and not program.comes_back:
            break
        time.sleep(RESTART_POLL_S)
        if time.monotonic() > deadline:
            break
    if program.ended_by:
        sys.stderr.write(f"{node}: killed by {program.ended_by}\n")
        return 0
    if status:
        sys.stderr.write(f"{node}: {describe_exit(status)}\n")
    return 128 - status if status < 0 else status


def execute(
    topology: Topology, command: list[str], nodes: list[str], limit_s: float, pcap: list[str] | None = None
) -> int:
    """Starts ``command`` on the nodes at once and waits for all; returns the worst exit status.

    A program ended by a signal counts as 128 + its number, one that overruns ``limit_s`` as 124. Ranks are
    given to the named nodes alone, in the topology's order. ``pcap`` names links whose packets are captured into
    the current folder.
    """
    check_links(topology, pcap or [])
    folder = Path.cwd().resolve()
    chosen = [node for node in topology.nodes if node in nodes]
    lock = threading.Lock()
    with (
        interruptible(),
        tempfile.TemporaryDirectory(prefix="dilocox-exec-") as scratch,
        Network(topology, expose=[folder, Path(scratch)]) as network,
        capturing(network, pcap or [], folder) as captures,
    ):
        Path(scratch).chmod(0o777)  # the programs' user writes here
        deadline = time.monotonic() + limit_s
        contracts = _contract(network, chosen, Path(scratch))
        threads: list[threading.Thread] = []

        def start(node: str) -> Program:
            process = network.nodes[node].start_program(
                command, network.user, contracts[node], subprocess.PIPE, folder
            )
            threads.append(threading.Thread(target=_forward, args=(node, process, lock), daemon=True))
            threads[-1].start()
            return Program(node, process, folder)

        programs = Programs([start(node) for node in chosen], start)
        with Conductor(network, topology.events, programs, tell=tell) as conductor:
            statuses = [_wait(program, deadline) for program in programs.all]
        for thread in threads:
            thread.join(timeout=2)
        for node in chosen:
            if node in network.groups and (said := network.groups[node].out_of_memory(node)):
                sys.stderr.write(f"{node}: {said}\n")
    for sentence in [f"{one}: its time had not come" for one in conductor.not_reached()]:
        sys.stderr.write(f"{sentence}\n")
    if problems := conductor.problems():
        raise TestbedError("; ".join(problems))
    for capture in captures:
        sys.stderr.write(f"{capture.sentence()}\n")
    return max(statuses, default=0)
