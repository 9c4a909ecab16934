"""One function a figure: frames in, a matplotlib Figure out, nothing drawn that is not in the frames.

`runs` are summary rows; only valid ones are drawn. Saving is `save`, in `experiments.figures`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from experiments.columns import TIMES
from experiments.drawing import (
    COLUMN_IN,
    PAGE_IN,
    Line,
    draw_line,
    evidence_line,
    lines,
    look,
    new_figure,
    styled_groups,
)
from experiments.styles import time_styles
from experiments.tables import significant

LOSS_LABEL = "validation loss (nats/token)"


def loss_vs_tokens(runs: pd.DataFrame, evals: pd.DataFrame) -> Figure:
    """Validation loss (nats per token) over tokens trained on, all replicas together."""
    return _one_loss_panel(runs, lambda axes: _tokens_panel(axes, runs, evals))


def loss_vs_time(runs: pd.DataFrame, evals: pd.DataFrame) -> Figure:
    """Validation loss (nats per token) over seconds of training, evaluation excluded."""
    return _one_loss_panel(runs, lambda axes: _time_panel(axes, runs, evals))


def loss_vs_wan_bytes(runs: pd.DataFrame, evals: pd.DataFrame) -> Figure:
    """Validation loss (nats per token) over bytes sent across the WAN so far, logarithmic.

    Wire bytes where they were counted, else payload. The evaluation before any byte was sent has no place
    on a logarithmic axis and is left out.
    """
    return _one_loss_panel(runs, lambda axes: _bytes_panel(axes, runs, evals))


def overview(runs: pd.DataFrame, evals: pd.DataFrame) -> Figure:
    """Validation loss over tokens, over wall time and over WAN bytes, side by side (180 mm wide)."""
    with look():
        figure = new_figure(PAGE_IN, 2.45)
        left, middle, right = figure.subplots(1, 3, sharey=True)
        drawn = [*_tokens_panel(left, runs, evals), *_time_panel(middle, runs, evals)]
        drawn += _bytes_panel(right, runs, evals)
        _loss_axis(left, drawn)
        for axes, letter in zip((left, middle, right), "abc", strict=True):
            axes.set_title(f"({letter})", loc="left", fontweight="bold")
        _legend_above(figure, left)
        evidence_line(figure, runs)
        return figure


def bytes_per_method(runs: pd.DataFrame) -> Figure:
    """WAN wire bytes per token of every configuration, logarithmic, mean over seeds, with its value."""
    with look():
        groups = [(g, s) for g, s in styled_groups(runs) if g.valid["wan_bytes_per_token"].mean() > 0]
        figure = new_figure(COLUMN_IN, 0.75 + 0.3 * max(1, len(groups)))
        axes = figure.subplots()
        values = [float(group.valid["wan_bytes_per_token"].mean()) for group, _ in groups]
        axes.barh(
            [group.label for group, _ in groups],
            values,
            color=[style.colour for _, style in groups],
            height=0.6,
        )
        axes.set_xscale("log")
        if values:
            axes.set_xlim(10 ** np.floor(np.log10(min(values)) - 0.3), max(values) * 6)
        for place, value in enumerate(values):
            axes.annotate(significant(value), (value, place), (3, 0), textcoords="offset points", va="center")
        axes.xaxis.set_major_formatter(FuncFormatter(_plain_number))
        axes.set_xlabel("WAN wire bytes per token (log scale)")
        _as_list(axes)
        evidence_line(figure, runs, "mean over seeds" if _seeds(runs) > 1 else "one seed")
        return figure


def time_budget(runs: pd.DataFrame) -> Figure:
    """Where the wall time of every configuration went, in % of it, mean over ranks and seeds."""
    with look():
        groups = styled_groups(runs)
        figure = new_figure(COLUMN_IN, 1.15 + 0.3 * max(1, len(groups)))
        axes = figure.subplots()
        labels = [group.label for group, _ in groups]
        left = np.zeros(len(groups))
        for column in TIMES:
            if not runs[column].fillna(0).any():
                continue  # most runs keep no checkpoints, and records of older ones do not know the word
            style = time_styles()[column]
            shares = np.array(
                [100 * (group.valid[column] / group.valid["wall_s"]).mean() for group, _ in groups]
            )
            shares = np.nan_to_num(shares)
            axes.barh(
                labels,
                shares,
                left=left,
                height=0.6,
                color=style["colour"],
                hatch=style["hatch"],
                edgecolor="white",
                linewidth=0.4,
                label=style["label"],
            )
            left += shares
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of wall time (%)")
        _as_list(axes)
        figure.legend(loc="outside upper center", ncols=3, columnspacing=1, handlelength=1.4)
        evidence_line(figure, runs, "mean over seeds" if _seeds(runs) > 1 else "one seed")
        return figure


def link_utilisation(
    runs: pd.DataFrame, links: pd.DataFrame, records: Mapping[str, Mapping[str, Any]]
) -> Figure:
    """How busy the site uplinks were over time, one panel per configuration (its first valid seed).

    The line is the mean over uplinks, the band from the least to the most busy one; between two samples of
    the counters (0.5 s) the mean is drawn. In % of the link's rate where the record states it, else Mbit/s.

    Args:
        links: columns run_id, t (s since launch), link, tx_bytes (cumulative).
        records: by run id: `totals.wan_links`, `totals.train_began_t`, `links.wanted`.
    """
    with look():
        shown = [(group, style, group.valid.iloc[0]["run_id"]) for group, style in styled_groups(runs)]
        found = {run: uplink_rates(links[links["run_id"] == run], records[run]) for _, _, run in shown}
        shown = [entry for entry in shown if not found[entry[2]].empty]
        figure = new_figure(COLUMN_IN, 0.8 + 0.72 * max(1, len(shown)))
        panels = figure.subplots(max(1, len(shown)), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        unit = "Mbit/s"
        for axes, (group, style, run) in zip(panels, shown, strict=False):
            rates = found[run]
            unit = str(rates["unit"].iloc[0])
            edges = np.append(rates["t"].iloc[0] - rates["seconds"].iloc[0], rates["t"])
            axes.stairs(rates["mean"], edges, fill=True, color=style.colour, alpha=0.25)
            axes.stairs(
                rates["high"], edges, baseline=rates["low"], fill=True, color=style.colour, alpha=0.25
            )
            axes.stairs(rates["mean"], edges, color=style.colour, linewidth=0.7)
            mean = float(np.average(rates["mean"], weights=rates["seconds"]))
            axes.set_title(f"{group.label}: mean {significant(mean, 2)} {unit}", loc="left", pad=2)
            axes.set_ylim(bottom=0)
            axes.set_xlim(left=0)
        panels[-1].set_xlabel("time since training began (s, evaluation included)")
        figure.supylabel(
            "WAN uplink in use (% of its rate)" if unit == "%" else "WAN uplink in use (Mbit/s)", fontsize=7.5
        )
        evidence_line(figure, runs, "one run each, 0.5 s means")
        return figure


def uplink_rates(links: pd.DataFrame, record: Mapping[str, Any]) -> pd.DataFrame:
    """One run's `links` as columns t (s since training began, end of an interval), seconds, mean, low, high, unit.

    Empty where the record names no uplinks or nothing was sampled.
    """
    totals = record.get("totals") or {}
    wanted = (record.get("links") or {}).get("wanted") or []
    rate_of = {
        link["name"]: float(link["rate_mbps"]) for link in wanted if "name" in link and "rate_mbps" in link
    }
    names = totals.get("wan_links") or []
    own = links[links["link"].isin(names)]
    if len(own) < 2 * max(1, len(names)):
        return pd.DataFrame(columns=["t", "seconds", "mean", "low", "high", "unit"])
    known = all(name in rate_of for name in names)
    began = float(totals.get("train_began_t") or 0.0)
    clock = np.unique(own["t"].to_numpy(float).round(2))
    clock = clock[clock >= began]
    seconds = np.diff(clock)
    uses = []
    for name in names:
        link = own[own["link"] == name].sort_values("t")
        counter = np.interp(clock, link["t"].to_numpy(float), link["tx_bytes"].to_numpy(float))
        mbps = np.diff(counter) * 8e-6 / seconds
        uses.append(100 * mbps / rate_of[name] if known else mbps)
    return pd.DataFrame(
        {
            "t": clock[1:] - began,
            "seconds": seconds,
            "mean": np.mean(uses, axis=0),
            "low": np.min(uses, axis=0),
            "high": np.max(uses, axis=0),
            "unit": "%" if known else "Mbit/s",
        }
    )


def _one_loss_panel(runs: pd.DataFrame, draw: Any) -> Figure:
    with look():
        figure = new_figure(COLUMN_IN, 2.5)
        axes = figure.subplots()
        _loss_axis(axes, draw(axes))
        _legend_above(figure, axes)
        evidence_line(figure, runs)
        return figure


def _tokens_panel(axes: Axes, runs: pd.DataFrame, evals: pd.DataFrame) -> list[Line]:
    largest = float(evals["tokens"].max()) if len(evals) else 0.0
    unit, name = next(
        ((u, n) for u, n in ((1e9, "billions"), (1e6, "millions"), (1e3, "thousands")) if largest >= u),
        (1, ""),
    )
    drawn = lines(runs, evals.assign(x=evals["tokens"] / unit), "x")
    axes.set_xlabel(f"tokens ({name})" if name else "tokens")
    return _draw(axes, drawn)


def _time_panel(axes: Axes, runs: pd.DataFrame, evals: pd.DataFrame) -> list[Line]:
    axes.set_xlabel("wall time of training (s)")
    return _draw(axes, lines(runs, evals, "t"))


def _bytes_panel(axes: Axes, runs: pd.DataFrame, evals: pd.DataFrame) -> list[Line]:
    kind = "wire" if evals["wan_wire_bytes"].notna().any() else "payload"
    sent = evals.assign(x=evals[f"wan_{kind}_bytes"] / 1e6)
    axes.set_xscale("log")
    axes.set_xlabel(f"WAN {kind} MB so far (log scale)")
    axes.xaxis.set_major_formatter(FuncFormatter(_plain_number))
    return _draw(axes, lines(runs, sent[sent["x"] > 0], "x"))


def _draw(axes: Axes, drawn: list[Line]) -> list[Line]:
    for line in drawn:
        draw_line(axes, line)
    return drawn


def _loss_axis(axes: Axes, drawn: list[Line]) -> None:
    """From the lowest to the highest loss after the start; lines from an untrained model enter from above."""
    axes.set_ylabel(LOSS_LABEL)
    if not drawn:
        return
    low = min(float(line.low.min()) for line in drawn)
    high = max(float((line.high[line.x > 0] if (line.x > 0).any() else line.high).max()) for line in drawn)
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)


def _plain_number(value: float, _place: int | None) -> str:
    return f"{value:,.10g}"


def _legend_above(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        wide = figure.get_figwidth() > COLUMN_IN + 1
        longest = max(len(label) for label in labels)
        columns = max(1, min(len(labels), int((110 if wide else 50) / (longest + 7))))
        figure.legend(handles, labels, loc="outside upper center", ncols=columns, handlelength=2.6)


def _as_list(axes: Axes) -> None:
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _seeds(runs: pd.DataFrame) -> int:
    return int(runs[runs["valid"]]["seed"].nunique())
