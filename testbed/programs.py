"""What is done to the programs of nodes while they run: killed, frozen, thawed, started again.

A program lives in a PID namespace of its own, so the tree below the process that we started is all of it. Each action
is read back from /proc before it counts as done.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from testbed.errors import TestbedError
from testbed.launch import Program

DONE_TIMEOUT_S = 2.0


def tree(pid: int) -> list[int]:
    """A process and its living descendants, parents first."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in tree(int(child)))]


def state(pid: int) -> str:
    """The state letter of a process; empty when there is none of that id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


class Programs:
    """The programs of all nodes, and how one of them is started (again)."""

    def __init__(self, programs: list[Program], start: Callable[[str], Program] | None = None) -> None:
        self.all = programs
        self._start = start

    def _of(self, node: str) -> Program:
        for program in self.all:
            if program.node == node:
                return program
        raise TestbedError(f"node {node}: no program of ours runs there")

    def kill(self, node: str, by: str, *, comes_back: bool = False) -> None:
        """SIGKILL to the whole tree; ``by``: the event that asked for it, which the launch then names."""
        program = self._of(node)
        if program.process.poll() is not None:
            return
        program.killed_before = program.ended_by = by
        program.comes_back = comes_back
        pids = tree(program.process.pid)
        for pid in pids:
            _signal(pid, signal.SIGKILL)
        _wait(lambda: all(state(pid) in ("", "Z", "X") for pid in pids), f"node {node} survives SIGKILL")
        program.process.poll()

    def freeze(self, node: str) -> None:
        """SIGSTOP to the whole tree below the process that started the namespace, until all of it stands still."""
        program = self._of(node)
        self._alive(program)

        def frozen() -> bool:
            moving = [pid for pid in tree(program.process.pid)[1:] if state(pid) not in ("T", "Z", "X", "")]
            for pid in moving:
                _signal(pid, signal.SIGSTOP)
            return not moving

        _wait(frozen, f"node {node} does not stand still")

    def thaw(self, node: str) -> None:
        """SIGCONT to the whole tree."""
        program = self._of(node)
        self._alive(program)

        def going() -> bool:
            still = [pid for pid in tree(program.process.pid) if state(pid) == "T"]
            for pid in still:
                _signal(pid, signal.SIGCONT)
            return not still

        _wait(going, f"node {node} does not go on")
        program.progressed = time.monotonic()

    def restart(self, node: str, by: str) -> None:
        """Starts the node's program with the same contract, after killing what still lives of it."""
        program = self._of(node)
        if self._start is None:
            raise TestbedError(f"node {node}: its program cannot be started again here")
        self.kill(node, by, comes_back=True)
        fresh = self._start(node)
        program.process, program.ticks, program.progressed = fresh.process, 0, time.monotonic()
        program.ended_by, program.comes_back = None, False

    @staticmethod
    def _alive(program: Program) -> None:
        if program.process.poll() is not None:
            raise TestbedError(f"node {program.node}: its program has ended already")


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(done: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + DONE_TIMEOUT_S
    while not done():
        if time.monotonic() > deadline:
            raise TestbedError(f"{otherwise} within {DONE_TIMEOUT_S:g} s")
        time.sleep(0.001)
