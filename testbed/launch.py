"""Starts one program per node, watches that all of them get on, and names the one that did not.

A program that dies or makes no progress ends the whole launch: the others only wait for it. Progress is CPU time
of its process tree or bytes out of its node.
"""

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from testbed.errors import ProgramFailed

POLL_S = 0.05
GRACE_S = 0.5
"""When one dies its peers follow within a moment; all that die within this time are compared."""
CPU_PROGRESS_TICKS = 2  # of 10 ms


@dataclass
class Program:
    """A running program of a node."""

    node: str
    process: "subprocess.Popen[str]"
    log: Path
    ticks: int = 0
    sent_bytes: int = 0
    progressed: float = field(default_factory=time.monotonic)


def tree_cpu_ticks(pid: int) -> int:
    """CPU time of a process and its living descendants, in clock ticks (waited-for children included)."""
    total = 0
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += sum(int(f) for f in fields[11:15])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    except (OSError, IndexError):
        return total
    return total + sum(tree_cpu_ticks(int(child)) for child in children)


def describe_exit(status: int) -> str:
    """An exit status in words."""
    if status < 0 or status > 128:
        number = -status if status < 0 else status - 128
        return f"killed by signal {number}"
    return f"exited with status {status}"


def _first_to_blame(dead: dict[str, int], order: list[str]) -> str:
    """Killed by a signal before exited by itself: those that lose their peer exit, the one that was killed did not."""
    return min(order, key=lambda node: (0 if dead[node] < 0 or dead[node] > 128 else 1, order.index(node)))


def wait_for_all(
    programs: list[Program],
    stall_s: float = 30.0,
    limit_s: float = 24 * 3600.0,
    sent_bytes: Callable[[], Mapping[str, int]] | None = None,
    on_poll: Callable[[], None] | None = None,
) -> dict[str, int]:
    """Waits until every program has ended with status 0.

    Args:
        programs: what was started.
        stall_s: a program without CPU and byte progress for this long has failed.
        limit_s: the whole launch takes at most this long.
        sent_bytes: node -> bytes that it has sent so far; called about once a second.
        on_poll: called some twenty times a second (progress display, counters).

    Returns:
        node -> exit status, all 0.

    Raises:
        ProgramFailed: names the node that failed first. The caller kills the rest.
    """
    began = time.monotonic()
    ended: dict[str, int] = {}
    order: list[str] = []
    bytes_read = 0.0
    while True:
        now = time.monotonic()
        for program in programs:
            status = program.process.poll()
            if status is not None and program.node not in ended:
                ended[program.node] = status
                order.append(program.node)
        failed = [node for node in order if ended[node] != 0]
        if failed:
            deadline = now + GRACE_S
            while time.monotonic() < deadline and any(p.process.poll() is None for p in programs):
                time.sleep(POLL_S)
            statuses = {p.node: s for p in programs if (s := p.process.poll()) is not None}
            failed += [node for node, s in statuses.items() if s != 0 and node not in failed]
            node = _first_to_blame(statuses, failed)
            log = next(p.log for p in programs if p.node == node)
            raise ProgramFailed(node, describe_exit(statuses[node]), str(log))
        if len(ended) == len(programs):
            return ended
        if now - bytes_read >= 1.0:
            bytes_read = now
            _note_progress(programs, now, sent_bytes() if sent_bytes else {})
        _check_stall(programs, ended, now, stall_s)
        if now - began > limit_s:
            slowest = next(p for p in programs if p.node not in ended)
            raise ProgramFailed(slowest.node, f"did not end within {limit_s:g} s", str(slowest.log))
        if on_poll:
            on_poll()
        time.sleep(POLL_S)


def _note_progress(programs: list[Program], now: float, sent: Mapping[str, int]) -> None:
    for program in programs:
        ticks, sent_bytes = tree_cpu_ticks(program.process.pid), sent.get(program.node, 0)
        if ticks - program.ticks >= CPU_PROGRESS_TICKS or sent_bytes > program.sent_bytes:
            program.ticks, program.sent_bytes, program.progressed = ticks, sent_bytes, now


def _check_stall(programs: list[Program], ended: dict[str, int], now: float, stall_s: float) -> None:
    running = [p for p in programs if p.node not in ended]
    stalled = min(running, key=lambda p: p.progressed, default=None)
    if stalled and now - stalled.progressed > stall_s:
        what = f"made neither CPU nor byte progress for {stall_s:g} s"
        raise ProgramFailed(stalled.node, what, str(stalled.log))
