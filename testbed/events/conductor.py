"""Lets the events happen at their time, and writes down when each was asked for and when it was in effect.

A thread of its own: what it does must not wait for anybody's poll. It looks at the programs' progress only while an
event waits for a step or a round, and it ends before the network is taken down.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from testbed.errors import TestbedError
from testbed.events.changes import State, apply
from testbed.events.kinds import AnyEvent, describe
from testbed.events.live import Live
from testbed.events.schedule import CutOff, Due, OnNode, Progress, Schedule
from testbed.network import Network
from testbed.programs import Programs
from testbed.thresholds import EVENT_LATE_S, EVENT_RESTART_LATE_S

POLL_S = 0.02
"""How often progress is looked at: an event at a step begins at most so much after the step is written down."""
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Happened:
    """One change, asked for and in effect. Times in seconds: ``asked_s`` and ``effect_s`` since the events' zero."""

    event: int  # its place in the list, from 1
    turn: int  # which repetition, from 0
    do: str
    what: str
    asked_s: float
    effect_s: float | None  # measured after the change was applied and read back; None where that failed
    t: float  # the same moment on the monotonic clock
    settles_s: float = 0.0  # until packets that were under way with a longer delay have left
    problem: str = ""

    @property
    def late_s(self) -> float:
        """How much later than asked for."""
        return (self.effect_s if self.effect_s is not None else self.asked_s) - self.asked_s

    def __str__(self) -> str:
        said = f"FAILED: {self.problem}" if self.problem else f"in effect {1e3 * self.late_s:.0f} ms later"
        return f"event {self.event} at {self.asked_s:.1f} s: {self.what} ({said})"

    def row(self, t0: float) -> dict[str, Any]:
        """As plain data; ``t`` in seconds since ``t0``, the clock of links.parquet."""
        return {**asdict(self), "t": self.t - t0, "late_s": self.late_s}


@dataclass(frozen=True)
class Disturbance:
    """Something that keeps programs from getting on, as long as it lasts."""

    what: str
    since_s: float
    until_s: float | None


class Conductor:
    """A context in which the events of a network happen.

    Args:
        network: it is up.
        events: what shall happen.
        programs: of the nodes; None where nothing of ours runs in them.
        began: the zero of ``at_s`` on the monotonic clock, or None while it has not come yet.
        progress: how many steps and rounds are completed.
        tell: called (by the events' thread) with each change once it is in effect.
    """

    def __init__(
        self,
        network: Network,
        events: Sequence[AnyEvent],
        programs: Programs | None = None,
        *,
        began: Callable[[], float | None] = time.monotonic,
        progress: Callable[[], Progress] | None = None,
        tell: Callable[[Happened], None] | None = None,
    ) -> None:
        self.events = list(events)
        self.zero: float | None = None
        self.happened: list[Happened] = []
        self._network, self._programs = network, programs
        self._schedule = Schedule(events)
        self._began, self._progress, self._tell = began, progress, tell
        self._state = State(network.now)
        self._latest: dict[int, Disturbance] = {}
        self._frozen: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._crashed: BaseException | None = None

    def __enter__(self) -> Self:
        if self.events:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            with Live(self._network) as live:
                while not self._stop.is_set():
                    self._turn(live)
        except Exception as error:  # told by problems(), which makes the run invalid
            self._crashed = error

    def _turn(self, live: Live) -> None:
        if self.zero is None:
            self.zero = self._began()
        if self.zero is None:
            self._stop.wait(POLL_S)
            return
        if self._schedule.awaits_progress and self._progress:
            self._schedule.reached(self._progress(), time.monotonic() - self.zero)
        for due in self._schedule.due(time.monotonic() - self.zero):
            if self._stop.is_set():
                return
            self._happen(due, live)
        next_s = self._schedule.next_s()
        wait_s = 1.0 if next_s is None else self.zero + next_s - time.monotonic()
        if self._schedule.awaits_progress:
            wait_s = min(wait_s, POLL_S)
        self._stop.wait(max(0.0, min(wait_s, 1.0)))

    def _happen(self, due: Due, live: Live) -> None:
        settles_s, problem = 0.0, ""
        event = self.events[due.event - 1]
        zero = self.zero or 0.0
        try:
            for change in due.step.changes:
                if isinstance(change, OnNode):
                    self._on_node(change, f"event {due.event} ({describe(event)})")
            state = self._state
            for change in due.step.changes:
                if not isinstance(change, OnNode):
                    state = apply(state, change, self._network.plan)
            if state != self._state:
                settles_s = live.follow(state.plan)
                self._state = state
        except TestbedError as error:
            problem = str(error)
        now = time.monotonic()
        self._remember(due, now - zero)
        effect_s = None if problem else now - zero
        one = Happened(
            due.event, due.turn, event.do, due.step.text, due.at_s, effect_s, now, settles_s, problem
        )
        self.happened.append(one)
        if self._tell:
            self._tell(one)

    def _on_node(self, change: OnNode, by: str) -> None:
        if self._programs is None:
            raise TestbedError(f"{change.verb} {change.node}: no program of ours runs there")
        if change.verb == "kill":
            self._programs.kill(change.node, by, comes_back=self._schedule.will_restart(change.node))
        elif change.verb == "restart":
            self._programs.restart(change.node, by)
        elif change.verb == "freeze":
            self._programs.freeze(change.node)
        else:
            self._programs.thaw(change.node)

    def _remember(self, due: Due, now_s: float) -> None:
        """What stands in the way of the programs from now on, and which nodes stand still."""
        until = None if due.step.lasts_s is None else due.at_s + due.step.lasts_s
        for change in due.step.changes:
            if isinstance(change, OnNode):
                self._frozen.pop(change.node, None)
                if change.verb == "freeze":
                    self._frozen[change.node] = due.event
            if isinstance(change, CutOff) or (isinstance(change, OnNode) and change.verb == "freeze"):
                self._latest[due.event] = Disturbance(due.step.text, now_s, until)

    def disturbances(self) -> list[Disturbance]:
        """What stands in the way of the programs at this moment."""
        numbers = {holder for holder, _ in self._state.held} | set(self._frozen.values())
        return [self._latest[n] for n in sorted(numbers) if n in self._latest]

    def disturbed(self) -> str:
        """The same in words; empty when there is nothing."""
        return " and ".join(f"{d.what} since {d.since_s:.1f} s" for d in self.disturbances())

    def will_pass(self) -> bool:
        """Whether something stands in the way and all of it ends by itself."""
        now = self.disturbances()
        return bool(now) and all(d.until_s is not None for d in now)

    def problems(self) -> list[str]:
        """What did not happen as asked, as sentences."""
        found = []
        if self._crashed is not None:
            found.append(f"the events stopped: {type(self._crashed).__name__}: {self._crashed}")
        if self._thread.ident is not None and self._thread.is_alive() and self._stop.is_set():
            found.append(f"an event did not end within {STOP_TIMEOUT_S:g} s")
        for one in self.happened:
            allowed = EVENT_RESTART_LATE_S if one.do == "restart" else EVENT_LATE_S
            if one.problem:
                found.append(f"event {one.event} ({one.what}): {one.problem}")
            elif one.late_s > allowed:
                found.append(
                    f"event {one.event} ({one.what}): in effect {one.late_s:.2f} s after it was asked for,"
                    f" allowed {allowed:g} s"
                )
        return found

    def not_reached(self) -> list[str]:
        """Events whose time had not come when the programs ended."""
        return [f"event {n} ({describe(self.events[n - 1])})" for n in self._schedule.not_reached()]
