"""Events of a run: how far the training is for those that wait for it, and what the record says about them."""

import time
from pathlib import Path
from typing import Any

from experiments.series import last_line
from testbed.events.conductor import Conductor
from testbed.events.kinds import describe
from testbed.events.schedule import Progress


class TrainingProgress:
    """Reads how far the trainers are from the lines that they write."""

    def __init__(self, run_dir: Path) -> None:
        self._ranks = run_dir / "ranks"
        self._began: float | None = None
        self._before = self._written()  # by what a resumed run goes on from

    def began(self) -> float | None:
        """When the first training step began, on the monotonic clock: the trainers' first evaluation ends there."""
        if self._began is None and self._written() > self._before:
            self._began = time.monotonic()
        return self._began

    def _written(self) -> int:
        """Bytes of evaluations and steps written so far."""
        paths = [p for kind in ("evals", "steps") for p in self._ranks.glob(f"rank-*.{kind}.jsonl")]
        return sum(map(_size, paths))

    def read(self) -> Progress:
        """The furthest step and round that any rank has completed."""
        return Progress(step=self._most("step"), round=self._most("round"))

    def _most(self, what: str) -> int:
        lines = [last_line(path) for path in self._ranks.glob(f"rank-*.{what}s.jsonl")]
        return max((int(line[what]) for line in lines if line), default=0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def event_record(conductor: Conductor | None, launched: float) -> dict[str, Any] | None:
    """What a record says about events: every change with its times, of a trace the number and the latest of them."""
    if conductor is None or not conductor.events:
        return None
    traces = {n for n, event in enumerate(conductor.events, 1) if event.do == "trace"}
    played = []
    for number in sorted(traces):
        rows = [one for one in conductor.happened if one.event == number]
        if rows:
            latest = max(one.late_s for one in rows)
            played.append({"event": number, "changes": len(rows), "late_max_s": latest})
    return {
        "asked": [describe(event) for event in conductor.events],
        "zero_t": None if conductor.zero is None else conductor.zero - launched,
        "happened": [one.row(launched) for one in conductor.happened if one.event not in traces],
        "traces": played,
        "not_reached": conductor.not_reached(),
        "problems": conductor.problems(),
    }
