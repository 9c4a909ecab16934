"""A report's opening paragraphs, written from the numbers: no sentence that they do not carry."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from experiments.tables import Group, group_runs, significant

CLAIMED_SPEEDUP = 357
"""Speedup over AllReduce in the abstract of arXiv:2506.21263 (107B parameters, 1 Gbit/s)."""

_A_LITTLE = 1.5
"""AllReduce is called "only a little slower" while hiding its waiting could gain less than this factor."""

_ANOTHER_RATIO = 10
"""The claim is about another ratio where this run's is smaller by at least this factor."""


def summary(runs: pd.DataFrame, records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Paragraphs in plain words; the first says how many runs count."""
    valid = runs[runs["valid"]]
    if valid.empty:
        return [f"None of the {len(runs)} runs in this folder is valid, so there is nothing to compare."]
    groups = [group for group in group_runs(runs) if not group.valid.empty]
    found = [" ".join([_what_ran(runs), *_set_up(valid, records)])]
    against = [sentence for group in groups if (sentence := _against_baseline(group, runs))]
    if against:
        found.append(" ".join(against))
    elif len(groups) > 1:
        found.append("No valid run of the baseline has the same conditions, so no ratios are given.")
    if "counted" in set(valid["evidence"]):
        found.append(
            "Runs without an emulated network say nothing about time across a WAN: no speedup is given."
        )
    found += _about_the_claim(valid, records)
    if max(len(group.valid) for group in groups) == 1:
        found.append("Each configuration ran with one seed: the spread between seeds is not known.")
    return found


def _what_ran(runs: pd.DataFrame) -> str:
    bad = int((~runs["valid"]).sum())
    if len(runs) == 1:
        return "One run, valid."
    if not bad:
        return "Both runs are valid." if len(runs) == 2 else f"All {len(runs)} runs are valid."
    them = "it is" if bad == 1 else "they are"
    return f"{len(runs) - bad} of {len(runs)} runs are valid; of the other {bad}, nothing is averaged in: {them} listed below."


def _set_up(valid: pd.DataFrame, records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    parts = []
    if (params := _the_one(valid["params"])) is not None:
        parts.append(f"a model of {significant(params / 1e6)} million parameters")
    replicas, stages = _the_one(valid["replicas"]), _the_one(valid["stages"])
    if replicas is not None and stages is not None:
        parts.append(f"{int(replicas)} replicas of {int(stages)} pipeline stage{'s' if stages > 1 else ''}")
    network = _network(valid, records)
    if network:
        parts.append(network)
    if (tokens := _the_one(valid["tokens"])) is not None:
        parts.append(f"{tokens:,.0f} tokens a run")
    return [f"Set-up: {', '.join(parts)}."] if parts else []


def _network(valid: pd.DataFrame, records: Mapping[str, Mapping[str, Any]]) -> str:
    names = {str((records[run].get("topology") or {}).get("name", "")) for run in valid["run_id"]}
    if len(names) != 1 or not (name := names.pop()):
        return ""
    rates = {rate for run in valid["run_id"] for rate in uplink_rates_mbps(records[run])}
    return f"network {name}" + (f" (site uplinks of {rates.pop():,.10g} Mbit/s)" if len(rates) == 1 else "")


def uplink_rates_mbps(record: Mapping[str, Any]) -> list[float]:
    """Rates asked for the site uplinks of a run, in Mbit/s of layer 2."""
    names = (record.get("totals") or {}).get("wan_links") or []
    wanted = (record.get("links") or {}).get("wanted") or []
    return [float(link["rate_mbps"]) for link in wanted if link.get("name") in names and "rate_mbps" in link]


def _against_baseline(group: Group, runs: pd.DataFrame) -> str:
    rows = group.valid[group.valid["baseline"].notna() & (group.valid["baseline"] != group.valid["run_id"])]
    if rows.empty:
        return ""
    base = runs[runs["run_id"].isin(rows["baseline"])]
    said = []
    volume, speed = _mean(rows["volume_reduction"]), _mean(rows["speedup"])
    if math.isfinite(volume):
        own, theirs = (significant(_mean(frame["wan_bytes_per_token"])) for frame in (rows, base))
        bytes_ = f"({own} against {theirs} WAN wire bytes per token)"
        if volume >= 1:
            said.append(f"sent {significant(volume)} times fewer bytes across the WAN {bytes_}")
        else:
            said.append(f"sent {significant(1 / volume)} times more bytes across the WAN {bytes_}")
    if math.isfinite(speed):
        said.append(f"trained {significant(speed)} times as many tokens per second")
    gap = _mean(rows["loss_gap"])
    if math.isfinite(gap):
        own, theirs = (f"{_mean(frame['val_loss']):.3f}" for frame in (rows, base))
        way = "higher" if gap >= 0 else "lower"
        said.append(f"ended {abs(gap):.3f} nats per token {way} in validation loss ({own} against {theirs})")
    to_loss = _mean(rows["speedup_to_loss"])
    if math.isfinite(to_loss):
        time = f"{significant(1 / to_loss)} times the baseline's wall time"
        said.append(f"took {time} to the loss that both reach (speedup to loss {significant(to_loss)})")
    baseline = group_runs(base)[0].label
    return f"Against {baseline}, {group.label} {_and(said)}." if said else ""


def _about_the_claim(valid: pd.DataFrame, records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How far hiding communication could go here, and that the published factor is about another ratio."""
    base = valid[
        (valid["method"] == "allreduce")
        & (valid["run_id"] == valid["baseline"])
        & (valid["evidence"] == "trained")
        & (valid["exposed_comm_s"] < valid["wall_s"])
    ]
    if base.empty:
        return []
    ratio = _mean(base["exposed_comm_s"] / (base["wall_s"] - base["exposed_comm_s"]))
    share = 100 * ratio / (1 + ratio)
    if not math.isfinite(ratio) or ratio <= 0:
        return []
    little = "only " if 1 + ratio < _A_LITTLE else ""
    text = (
        f"AllReduce waited for the WAN during {little}{significant(share)} % of its wall time, so hiding all of that"
        f" waiting could make it about {significant(1 + ratio)} times as fast"
    )
    network, params = _network(base, records), _the_one(base["params"])
    if little and network and params is not None:
        text += f": on {network} a model of {significant(params / 1e6)} million parameters is only a little slower"
        text += " with AllReduce"
    text += "."
    if ratio * _ANOTHER_RATIO < CLAIMED_SPEEDUP - 1:
        text += (
            f" The {CLAIMED_SPEEDUP}× of arXiv:2506.21263 (a throughput ratio, 107B parameters over 1 Gbit/s) is about"
            f" another ratio of communication to compute: a gain of {CLAIMED_SPEEDUP} by hiding communication needs"
            f" {CLAIMED_SPEEDUP - 1} times as much waiting as other wall time, and here it is {significant(ratio, 2)}"
            " times. These runs neither confirm nor refute it."
        )
    return [text]


def _the_one(values: "pd.Series[Any]") -> float | None:
    known = set(values.dropna())
    return float(known.pop()) if len(known) == 1 else None


def _mean(values: "pd.Series[Any]") -> float:
    return float(values.astype(float).mean()) if len(values) else math.nan


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
