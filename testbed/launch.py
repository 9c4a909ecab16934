"""Starts one program per node, watches that all of them get on, and names the one that did not.

A program that dies or makes no progress ends the whole launch: the others only wait for it. Progress is CPU time
of its process tree or bytes out of its node. A death that an event asked for is no failure by itself: those that are
left show whether they can go on, and if they cannot, the event is named.
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
    ended_by: str | None = None  # the event that killed it
    comes_back: bool = False  # an event will start it again
    killed_before: str | None = None  # the event that killed it, also once it was started again

    @property
    def died_as_asked(self) -> bool:
        """Whether it is dead because an event asked for it."""
        return self.ended_by is not None and self.process.poll() is not None

    @property
    def failed(self) -> bool:
        """Whether it ended badly by itself. An event may kill it or start it again while we look, hence twice."""
        return bool(self.process.poll()) and self.ended_by is None and bool(self.process.poll())


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
    *,
    sent_bytes: Callable[[], Mapping[str, int]] | None = None,
    on_poll: Callable[[], None] | None = None,
    disturbed: Callable[[], str] | None = None,
    patient: Callable[[], bool] | None = None,
) -> dict[str, int]:
    """Waits until every program has ended with status 0, or has died because an event asked for it.

    Args:
        programs: what was started.
        stall_s: a program without CPU and byte progress for this long has failed.
        limit_s: the whole launch takes at most this long.
        sent_bytes: node -> bytes that it has sent so far; called about once a second.
        on_poll: called some twenty times a second (progress display, counters).
        disturbed: what keeps programs from getting on at this moment, in words; said beside a failure.
        patient: whether that ends by itself: missing progress is not held against anybody until then.

    Returns:
        node -> exit status, 0 of each that was not killed by an event.

    Raises:
        ProgramFailed: names the node that failed first. The caller kills the rest.
    """
    began = time.monotonic()
    order: list[str] = []
    bytes_read = 0.0
    while True:
        now = time.monotonic()
        ended = {p.node: s for p in programs if (s := p.process.poll()) is not None}
        order = [node for node in order if node in ended] + [node for node in ended if node not in order]
        if any(p.failed for p in programs):
            raise _failure(programs, order, disturbed() if disturbed else "")
        asked = {p.node for p in programs if p.died_as_asked}
        if len(ended) == len(programs) and not any(p.comes_back for p in programs if p.node in asked):
            if len(asked) == len(programs):
                raise ProgramFailed(order[-1], f"killed by {programs[-1].ended_by}", str(programs[-1].log))
            return ended
        if now - bytes_read >= 1.0:
            bytes_read = now
            _note_progress(programs, now, sent_bytes() if sent_bytes else {})
        if patient and patient():
            for program in programs:
                program.progressed = now
        _check_stall(programs, ended, now, stall_s, disturbed)
        if now - began > limit_s:
            slowest = next(p for p in programs if p.node not in ended)
            raise ProgramFailed(slowest.node, f"did not end within {limit_s:g} s", str(slowest.log))
        if on_poll:
            on_poll()
        time.sleep(POLL_S)


def _failure(programs: list[Program], order: list[str], disturbed: str) -> ProgramFailed:
    """Who is to blame, once its peers have had a moment to die too: an event that killed a node comes first."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(p.process.poll() is None for p in programs):
        time.sleep(POLL_S)
    asked = [p for p in programs if p.killed_before]
    statuses = {p.node: p.process.poll() or 0 for p in programs if p.failed}
    failed = [node for node in order if node in statuses]
    failed += [node for node in statuses if node not in failed]
    node = _first_to_blame(statuses, failed)
    log = str(next(p.log for p in programs if p.node == node))
    if asked:
        victim = asked[0]
        what = f"killed by {victim.killed_before}; without it node {node} {describe_exit(statuses[node])}"
        return ProgramFailed(victim.node, what, log)
    return ProgramFailed(
        node, describe_exit(statuses[node]) + (f" while {disturbed}" if disturbed else ""), log
    )


def _note_progress(programs: list[Program], now: float, sent: Mapping[str, int]) -> None:
    for program in programs:
        ticks, sent_bytes = tree_cpu_ticks(program.process.pid), sent.get(program.node, 0)
        if ticks - program.ticks >= CPU_PROGRESS_TICKS or sent_bytes > program.sent_bytes:
            program.ticks, program.sent_bytes, program.progressed = ticks, sent_bytes, now


def _check_stall(
    programs: list[Program],
    ended: dict[str, int],
    now: float,
    stall_s: float,
    disturbed: Callable[[], str] | None,
) -> None:
    running = [p for p in programs if p.node not in ended]
    stalled = min(running, key=lambda p: p.progressed, default=None)
    if stalled and now - stalled.progressed > stall_s:
        what = f"made neither CPU nor byte progress for {stall_s:g} s"
        killed = [f"node {p.node} was killed by {p.ended_by}" for p in programs if p.died_as_asked]
        held = killed or [text for text in [disturbed() if disturbed else ""] if text]
        what += f" while {' and '.join(held)}" if held else ""
        raise ProgramFailed(stalled.node, what, str(stalled.log))
