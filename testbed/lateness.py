"""How late packets were released: a histogram with buckets that grow with the value, as data that can be subtracted.

Below 16 us a bucket is 1 us wide, above that it is at most 1/16 of its value, up to hours; so a quantile is told
to 6 %, whatever the scale, and two readings of a running process give the distribution of what lies between them.
"""

from collections.abc import Sequence
from typing import Any

SUB_BITS = 4
BUCKETS = 32 << SUB_BITS


def bucket(late_us: int) -> int:
    """The number of the bucket that a value in whole microseconds falls into."""
    if late_us < 1 << SUB_BITS:
        return late_us
    shift = late_us.bit_length() - SUB_BITS - 1
    return min(BUCKETS - 1, (shift << SUB_BITS) + (late_us >> shift))


def upper_edge_ms(number: int) -> float:
    """Where a bucket ends."""
    if number < 1 << SUB_BITS:
        return (number + 1) / 1e3
    shift = (number >> SUB_BITS) - 1
    return float(((number & 15) + 17) << shift) / 1e3


def quantile_ms(counts: Sequence[int], q: float) -> float:
    """The upper edge of the bucket that holds the quantile, in ms; 0 where nothing was counted."""
    remaining = q * sum(counts)
    for number, count in enumerate(counts):
        remaining -= count
        if count and remaining <= 0:
            return upper_edge_ms(number)
    return 0.0


class Lateness:
    """How long after its due time each packet left."""

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.packets = 0

    def add(self, late_s: float) -> None:
        """Counts one packet."""
        self.counts[bucket(int(late_s * 1e6))] += 1
        self.packets += 1

    def row(self) -> dict[str, Any]:
        """Quantiles for people, the histogram (cut after its last packet) for whoever subtracts two of them."""
        last = max((n for n, count in enumerate(self.counts) if count), default=-1)
        return {
            "packets": self.packets,
            "p50_ms": quantile_ms(self.counts, 0.5),
            "p99_ms": quantile_ms(self.counts, 0.99),
            "max_ms": quantile_ms(self.counts, 1.0),
            "histogram": self.counts[: last + 1],
        }


def between(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The histogram of what was counted after ``before`` and up to ``after``. Pure."""
    return [count - (before[n] if n < len(before) else 0) for n, count in enumerate(after)]
