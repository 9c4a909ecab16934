"""One line per configuration: its seeds averaged, their interval shown, what does not count listed apart."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.columns import varied_columns
from experiments.statistics import FEWEST, estimate
from experiments.styles import style_of


@dataclass(frozen=True)
class Group:
    """Runs of one configuration that differ in their seed only.

    `detail` names what tells it from other configurations of the same method; `runs` are rows of the
    summary, invalid ones included.
    """

    method: str
    detail: str
    runs: pd.DataFrame

    @property
    def valid(self) -> pd.DataFrame:
        """The rows that count."""
        return self.runs[self.runs["valid"]]

    @property
    def label(self) -> str:
        """Method and detail, for legends."""
        label = style_of(self.method).label
        return f"{label}, {self.detail}" if self.detail else label


@dataclass(frozen=True)
class Column:
    """A column of the table: its head, and how its value comes from a row of the summary."""

    head: str
    value: Callable[[Any], float]
    show: Callable[[float], str]


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, thousands separated, never in powers of ten."""
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


COLUMNS = (
    Column("val loss (nats)", lambda row: row["val_loss"], lambda x: f"{x:.3f}"),
    Column("bits/byte", lambda row: row["val_bpb"], lambda x: f"{x:.3f}"),
    Column(
        "tokens/s", lambda row: row["tokens_per_s"], lambda x: f"{x:,.0f}" if x >= 100 else significant(x)
    ),
    Column("WAN wire MB", lambda row: row["wan_wire_bytes"] / 1e6, significant),
    Column("WAN bytes/token", lambda row: row["wan_bytes_per_token"], significant),
    Column("volume reduction (×)", lambda row: row["volume_reduction"], significant),
    Column("speedup (×)", lambda row: row["speedup"], significant),
    Column("speedup to loss (×)", lambda row: row["speedup_to_loss"], significant),
    Column(
        "exposed comm (% of wall)", lambda r: 100 * r["exposed_comm_s"] / r["wall_s"], lambda x: f"{x:.1f}"
    ),
)
HEADS = ("method", "H", "compressor", *(column.head for column in COLUMNS), "valid")


def group_runs(runs: pd.DataFrame) -> list[Group]:
    """Summary rows by configuration and kind of evidence, in the order of styles.yaml, of H, of the run id."""
    keys = varied_columns(runs)
    parts = [part for _, part in runs.groupby([runs.apply(_identity, axis=1, args=(keys,))], sort=False)]
    firsts = [part.iloc[0] for part in parts]
    groups = []
    for first, part in zip(firsts, parts, strict=True):
        siblings = [other for other in firsts if other["method"] == first["method"]]
        groups.append(Group(str(first["method"]), _detail(first, siblings, keys), part))
    return sorted(groups, key=lambda g: (style_of(g.method).order, g.method, _steps(g)))


def table_rows(runs: pd.DataFrame) -> list[list[str]]:
    """The cells under `HEADS`: the mean over valid seeds, with its 95 % interval from three seeds on (two: range)."""
    rows = []
    for group in group_runs(runs):
        steps, first = _steps(group), group.runs.iloc[0]
        rows.append(
            [
                "\n  ".join([style_of(group.method).label, *_beyond_columns(group)]),
                _local_steps(steps, group),
                str(first["compressor"]),
                *(_cell(column, group.valid) for column in COLUMNS),
                _count(group),
            ]
        )
    return rows


def problem_lines(runs: pd.DataFrame) -> list[str]:
    """One sentence per run that does not count."""
    bad = runs[~runs["valid"]]
    return [f"{row['run_id']}: {row['status']}: {row['reason']}" for _, row in bad.iterrows()]


def note(runs: pd.DataFrame) -> str:
    """What the numbers of the table are: evidence, baseline, seeds."""
    valid = runs[runs["valid"]]
    if valid.empty:
        return "No run of this sweep is valid: there is nothing to compare."
    kinds = ", ".join(sorted(set(valid["evidence"])))
    parts = [f"Evidence: {kinds}."]
    baselines = sorted(set(valid["baseline"].dropna()))
    if baselines:
        parts.append(f"Ratios are against {', '.join(baselines)} (same seed).")
    else:
        parts.append("No valid baseline run: no ratios.")
    most = max(len(group.valid) for group in group_runs(runs))
    parts.append(
        "One seed each."
        if most == 1
        else f"Mean over seeds ({'95 % bootstrap interval' if most >= FEWEST else 'range'});"
        " valid: seeds that count."
    )
    return " ".join(parts)


ESSENTIAL = ("method", "H", "compressor", "val loss (nats)", "volume reduction (×)", "speedup (×)", "valid")
"""Columns for a narrow terminal with many configurations; `dilocox results --columns` shows any other."""
DETAIL_WIDTH = 24
"""Characters of the first column on a narrow terminal; longer details are folded."""
MEAN_DIFFERS = 0.05
NARROW = 130
"""Below so many characters the columns would break; few configurations are then shown side by side instead."""
MOST_SIDE_BY_SIDE = 5


def rich_table(runs: pd.DataFrame, width: int = NARROW) -> Table:
    """The table for a terminal `width` characters wide; its caption holds the note and the runs that do not count."""
    caption = "\n".join([note(runs), *problem_lines(runs)])
    rows = table_rows(runs)
    if width < NARROW and len(rows) <= MOST_SIDE_BY_SIDE:
        found = Table(
            box=None, pad_edge=False, caption=escape(caption), caption_justify="left", show_header=False
        )
        found.add_column(no_wrap=True)
        for _ in rows:
            found.add_column(justify="right")
        for head, *cells in zip(HEADS, *rows, strict=True):
            found.add_row(head, *(escape(cell) for cell in cells))
        return found
    shown = range(len(HEADS)) if width >= NARROW else [HEADS.index(head) for head in ESSENTIAL]
    found = Table(box=None, pad_edge=False, caption=escape(caption), caption_justify="left")
    for number in shown:
        justify: Literal["left", "right"] = "left" if number in (0, 2) else "right"
        longest = max((len(line) for row in rows for line in row[number].splitlines()), default=1)
        if number == 0 and width < NARROW:
            longest = min(longest, DETAIL_WIDTH)
        found.add_column(HEADS[number], justify=justify, overflow="fold", min_width=longest)  # heads may wrap
    for row in rows:
        found.add_row(*(escape(row[number]) for number in shown))
    return found


def plain_text(runs: pd.DataFrame, width: int = 160) -> str:
    """The same table without colours, `width` characters wide."""
    console = Console(width=width, no_color=True, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(rich_table(runs, width))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def _cell(column: Column, valid: pd.DataFrame) -> str:
    found = estimate([float(column.value(row)) for _, row in valid.iterrows()])
    if not found.count:
        return "–"
    mean, low, high = (column.show(x) for x in (found.mean, found.low, found.high))
    return mean if low == high else f"{mean}\n({low}–{high})"


def _count(group: Group) -> str:
    if len(group.runs) == 1:
        return "yes" if len(group.valid) else "no"
    return f"{len(group.valid)} of {len(group.runs)}"


def _local_steps(steps: int, group: Group) -> str:
    """H as asked for, and what an adaptive H came to on average."""
    mean = group.valid["mean_local_steps"].mean() if "mean_local_steps" in group.valid else math.nan
    adapted = math.isfinite(mean) and abs(mean - steps) > MEAN_DIFFERS
    return f"{steps} (mean {mean:.1f})" if steps and adapted else str(steps) if steps else "–"


def _steps(group: Group) -> int:
    steps = group.runs["local_steps"].iloc[0]
    return 0 if pd.isna(steps) else int(steps)


def _beyond_columns(group: Group) -> list[str]:
    """The detail without what H and compressor say already."""
    shown = ("H=", "compressor=")
    return [part for part in group.detail.split(", ") if part and not part.startswith(shown)]


def _identity(row: Any, keys: list[str]) -> str:
    return json.dumps([row["method"], row["evidence"], *(_plain(row[key]) for key in keys)], default=str)


def _detail(first: Any, siblings: list[Any], keys: list[str]) -> str:
    parts = []
    for key in ["evidence", *keys]:
        values = {json.dumps(_plain(other[key]), default=str) for other in siblings}
        wordy = key.startswith("topology.") and key != "topology.name"
        if len(values) > 1 and not wordy and _plain(first[key]) is not None:
            parts.append(f"{_short(key)}={_plain(first[key])}")
    return ", ".join(parts)


def _plain(value: Any) -> Any:
    """A cell as Python knows it: missing is None, 20.0 is 20."""
    if pd.isna(value):
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _short(key: str) -> str:
    known = {"method.local_steps": "H", "method.compressor.name": "compressor", "parallel.replicas": "D"}
    return known.get(key) or key.removeprefix("method.").removeprefix("train.")
