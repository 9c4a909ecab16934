"""Tells when the iterations of a repeated block have begun to come again, so that the rest need not be simulated."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_PERIOD = 3
"""Iterations of a repeated block that may differ among themselves and still come again as a whole."""
STEADY_TOLERANCE = 1e-9
"""Relative difference between durations that are the same but for rounding."""


@dataclass
class Mark:
    """State of one replica at the end of a block's iteration."""

    now: float
    values: tuple[float, ...]


def period_of(marks: list[list[Mark]]) -> int | None:
    """The number of iterations after which all replicas' iterations come again, None if that cannot be seen yet.

    A slow replica under one-step delay can settle into a cycle of two rounds: its partner's bytes come early
    in one and late in the next.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        if len(marks[0]) > 2 * period + 1 and all(_repeats(mine, period) for mine in marks):
            lasted = [mine[-1].now - mine[-1 - period].now for mine in marks]
            if all(_same(lasted[0], other) for other in lasted):
                return period
    return None


def _repeats(mine: list[Mark], period: int) -> bool:
    for back in range(1, period + 1):
        a, b = mine[-back - 1 - period], mine[-back - period]
        c, d = mine[-back - 1], mine[-back]
        if not _same(b.now - a.now, d.now - c.now):
            return False
        rows = zip(a.values, b.values, c.values, d.values, strict=True)
        if not all(_same(y - x, w - z) for x, y, z, w in rows):
            return False
    return True


def _same(a: float, b: float) -> bool:
    return abs(a - b) <= STEADY_TOLERANCE * max(abs(a), abs(b), 1e-3)
