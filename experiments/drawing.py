"""What all figures share: size, type, the look of a configuration, the line that names the evidence."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from experiments.statistics import FEWEST, estimate
from experiments.styles import Style, style_of, variant_styles
from experiments.tables import Group, group_runs

COLUMN_IN = 85 / 25.4
"""Width of one column of a paper."""
PAGE_IN = 180 / 25.4
"""Width of a page of two columns."""

EVIDENCE = {
    "trained": "trained, on emulated links",
    "counted": "counted, no emulated links",
    "replayed": "replayed on emulated links, compute paced",
    "simulated": "simulated",
    "arithmetic": "arithmetic",
}
"""Kind of evidence -> how a figure says it."""

_LOOK: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.labelsize": 7.5,
    "axes.titlesize": 7.5,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
    "figure.dpi": 200,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "dilocox",
}


Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]


@dataclass(frozen=True)
class Line:
    """One curve: its value at equal steps, over the valid seeds of a configuration.

    `x` and `y` are means over seeds, `low` and `high` as in `Estimate`; float64 of equal length.
    """

    label: str
    style: Style
    x: Floats
    y: Floats
    low: Floats
    high: Floats
    seeds: int


@contextmanager
def look() -> Iterator[None]:
    """The type sizes and line widths of this project, inside the `with` only."""
    with mpl.rc_context(_LOOK):
        yield


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure that keeps its parts from overlapping."""
    return Figure(figsize=(width_in, height_in), layout="constrained")


def styled_groups(runs: pd.DataFrame) -> list[tuple[Group, Style]]:
    """Configurations with a valid run, each with a look of its own.

    The first configuration of a method has the method's look; further ones other markers and lines and a
    lighter colour.
    """
    seen: dict[str, int] = {}
    found = []
    for group in group_runs(runs):
        if group.valid.empty:
            continue
        number = seen.get(group.method, 0)
        seen[group.method] = number + 1
        found.append((group, _variant(style_of(group.method), number)))
    return found


def _variant(style: Style, number: int) -> Style:
    if number == 0:
        return style
    markers, lines = variant_styles()["markers"], variant_styles()["lines"]
    first_marker = markers.index(style.marker) if style.marker in markers else 0
    first_line = lines.index(style.line) if style.line in lines else 0
    lighter = min(0.6, 0.25 * number)
    red, green, blue = (part + (1 - part) * lighter for part in to_rgb(style.colour))
    return replace(
        style,
        colour=to_hex((red, green, blue)),
        marker=markers[(first_marker + number) % len(markers)],
        line=lines[(first_line + number) % len(lines)],
    )


def lines(runs: pd.DataFrame, evals: pd.DataFrame, x: str, y: str = "val_loss") -> list[Line]:
    """One line per configuration from rows of `evals`; points without a finite x or y are left out.

    Seeds are averaged at equal steps, where every seed has a value.
    """
    found = []
    for group, style in styled_groups(runs):
        own = evals[evals["run_id"].isin(group.valid["run_id"])].dropna(subset=[x, y])
        seeds = own["run_id"].nunique()
        points = [
            (float(part[x].mean()), estimate(part[y].to_list()))
            for _, part in own.groupby("step", sort=True)
            if len(part) == seeds
        ]
        if not points:
            continue
        columns = zip(*((at, e.mean, e.low, e.high) for at, e in points), strict=True)
        x_, y_, low, high = (np.array(column, dtype=np.float64) for column in columns)
        found.append(Line(group.label, style, x_, y_, low, high, seeds))
    return found


def draw_line(axes: Axes, line: Line) -> None:
    """The mean as a line with markers, the interval (or range) over seeds as a band."""
    if line.seeds > 1:
        axes.fill_between(line.x, line.low, line.high, color=line.style.colour, alpha=0.18, linewidth=0)
    axes.plot(
        line.x,
        line.y,
        color=line.style.colour,
        marker=line.style.marker,
        linestyle=line.style.line,
        label=line.label,
        markevery=max(1, len(line.x) // 12),
        markeredgecolor="white",
        markeredgewidth=0.4,
        clip_on=True,
    )


def evidence_line(figure: Figure, runs: pd.DataFrame, note: str = "") -> None:
    """At the foot of every figure: what kind of evidence it shows, and `note` or how many seeds."""
    valid = runs[runs["valid"]]
    kinds = "; ".join(EVIDENCE.get(kind, kind) for kind in sorted(set(valid["evidence"])))
    most = max((len(group.valid) for group in group_runs(valid)), default=0) if len(valid) else 0
    spread = "95 % interval" if most >= FEWEST else "range"
    seeds = "one seed" if most == 1 else f"{most} seeds: mean and {spread}"
    text = f"evidence: {kinds}; {note or seeds}" if most else "no valid run"
    figure.supxlabel(text, fontsize=6, color="#555555", x=0.995, ha="right")
