"""Recorded bandwidth: a CSV of rates, or Mahimahi's list of packet-delivery opportunities, as (t_s, rate_mbps) points.

A point's rate holds until the next point; the last one holds as long as the interval before it (which is what a
looped trace needs), or for ever where the trace is not looped.
"""

import csv
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testbed.errors import TopologyError
from testbed.units import MAX_RATE_MBPS, WIRE_BYTES_PER_SEGMENT

Points = list[tuple[float, float]]
MAX_POINTS = 100_000
MIN_INTERVAL_S = 0.02
MAHIMAHI_UNIT_S = 1e-3
WIRE_BYTES_PER_OPPORTUNITY = WIRE_BYTES_PER_SEGMENT
"""Mahimahi's opportunity delivers 1504 bytes: a full IP packet of 1500 and 4 bytes of its TUN header. The same packet
is 1514 bytes at layer 2 here, so this, not 1504, lets as many full packets through."""
LEAK_S = 0.1
"""htb knows no rate of 0: where a trace is silent, one full frame passes in so long a time."""
CSV_COLUMNS = ["t_s", "rate_mbps"]


def check_points(points: Points) -> None:
    """Raises ValueError unless times ascend from 0 or later, far enough apart, and rates are ones that htb can shape."""
    if not 1 <= len(points) <= MAX_POINTS:
        raise ValueError(f"allowed are 1 to {MAX_POINTS} points")
    before = -math.inf
    for n, (t, rate) in enumerate(points, start=1):
        if not 0 <= rate <= MAX_RATE_MBPS:  # also refuses NaN
            raise ValueError(f"point {n}: found {rate!r} Mbit/s, allowed are 0 to {MAX_RATE_MBPS:.0f}")
        if not 0 <= t <= 1e7:
            raise ValueError(f"point {n}: found t_s {t!r}, allowed are times from 0 on")
        if t - before < MIN_INTERVAL_S - 1e-9:
            raise ValueError(
                f"point {n}: found t_s {t:g} after {before:g}, allowed are times that ascend by at least"
                f" {MIN_INTERVAL_S:g} s"
            )
        before = t


def read_trace(path: Path, bin_s: float) -> Points:
    """Reads a file of either format: Mahimahi's has one integer a line, a CSV has the columns t_s and rate_mbps.

    Raises:
        TopologyError: one sentence with the file, the line, what was found and what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise TopologyError(f"{path}: cannot be read ({reason}), allowed is a readable trace") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise TopologyError(f"{path}: found nothing in it, allowed is a trace")
    try:
        points = from_mahimahi(lines, bin_s) if lines[0].strip().isdecimal() else from_csv(text)
        check_points(points)
    except ValueError as error:
        raise TopologyError(f"{path}: {error}") from error
    return points


def from_csv(text: str) -> Points:
    """Points of a CSV; raises ValueError naming the line."""
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    names = [name.strip() for name in rows.fieldnames or []]
    if any(column not in names for column in CSV_COLUMNS):
        raise ValueError(
            f"found the columns {', '.join(names)}; allowed is a CSV with t_s and rate_mbps, or Mahimahi's format"
        )
    rows.fieldnames = names
    points = []
    for row in rows:
        try:
            t, rate = (float(row[column] or "") for column in CSV_COLUMNS)
        except (TypeError, ValueError):
            raise ValueError(
                f"line {rows.line_num}: found {[row[c] for c in CSV_COLUMNS]}, allowed are two numbers"
            ) from None
        points.append((t, rate))
    return points


def from_mahimahi(lines: list[str], bin_s: float) -> Points:
    """Mean rate of every ``bin_s`` of a packet-delivery trace: each line is a millisecond in which one packet may pass.

    The trace is as long as its last line says, as in Mahimahi; opportunities in its last millisecond belong to the
    last bin. Bins without an opportunity have the rate 0.
    """
    times: list[int] = []
    for n, line in enumerate(lines, start=1):
        if not line.strip().isdecimal():
            raise ValueError(
                f"line {n}: found {line.strip()[:40]!r}, allowed is a whole number of milliseconds"
            )
        times.append(int(line))
        if len(times) > 1 and times[-1] < times[-2]:
            raise ValueError(
                f"line {n}: found {times[-1]} after {times[-2]}, allowed are ascending milliseconds"
            )
    length_ms = times[-1]
    if length_ms == 0:
        raise ValueError("found only the millisecond 0, allowed is a trace of at least 1 ms")
    bin_ms = round(bin_s * 1e3)
    count = math.ceil(length_ms / bin_ms)
    if count > MAX_POINTS:
        raise ValueError(f"found {count} bins of {bin_s:g} s, allowed are at most {MAX_POINTS}: raise bin_s")
    opportunities = [0] * count
    for time_ms in times:
        opportunities[min(count - 1, time_ms // bin_ms)] += 1
    points = []
    for k, n in enumerate(opportunities):
        width_ms = min(bin_ms, length_ms - k * bin_ms)
        points.append((k * bin_ms * MAHIMAHI_UNIT_S, n * WIRE_BYTES_PER_OPPORTUNITY * 8e-3 / width_ms))
    if len(points) > 1 and length_ms - (count - 1) * bin_ms < bin_ms / 2:
        points.pop()  # a sliver at the end says little, and a looped trace would give it a whole bin
    return points


def shapeable_mbps(rate_mbps: float) -> float:
    """The rate that htb is told for a point: silence becomes one full frame every ``LEAK_S``."""
    return max(rate_mbps, WIRE_BYTES_PER_SEGMENT * 8e-6 / LEAK_S)


def length_s(points: Points) -> float:
    """How long one pass through a trace takes."""
    if len(points) == 1:
        return points[0][0] + 1.0
    return 2 * points[-1][0] - points[-2][0]


def play(points: Points, *, loop: bool) -> Iterator[tuple[float, float]]:
    """(t_s, rate_mbps to shape) since the trace began; without end where it is looped."""
    passed = 0.0
    while True:
        for t, rate in points:
            yield passed + t, shapeable_mbps(rate)
        if not loop:
            return
        passed += length_s(points)


def inline_traces(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The mapping of a topology with the points of every trace file in it; paths are relative to ``folder``.

    A trace that has its points already is left alone: so a stored configuration is complete without the file.
    """
    events = data.get("events")
    if not isinstance(events, list):
        return data
    return {**data, "events": [_inline(event, folder) for event in events]}


def _inline(event: Any, folder: Path) -> Any:
    if not isinstance(event, dict) or event.get("do") != "trace" or event.get("points") is not None:
        return event
    file, bin_s = event.get("file"), event.get("bin_s", 0.1)
    if not isinstance(file, str) or not isinstance(bin_s, int | float) or not MIN_INTERVAL_S <= bin_s <= 10:
        return event  # the model says what is wrong with it
    path = Path(file) if Path(file).is_absolute() or not (folder / file).exists() else folder / file
    return {**event, "points": read_trace(path, float(bin_s))}
