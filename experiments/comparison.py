"""Sets every valid run against its baseline: bytes, speed, speed to the same loss, loss."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from experiments.columns import RATIOS
from experiments.sweep import matches


def compare(
    rows: pd.DataFrame,
    configs: Mapping[str, Mapping[str, Any]],
    evals: pd.DataFrame,
    baseline: Mapping[str, Any],
) -> pd.DataFrame:
    """`rows` with `baseline` (a run id) and the columns of `RATIOS`.

    A run's baseline is the fastest valid run that matches `baseline` and has the same seed, model, data,
    batch, pace of compute, topology and kind of evidence. Invalid and failed runs have no ratios and are
    nobody's baseline. Where the evidence is `counted` (no emulated network) times are not compared.

    Args:
        rows: one row per run, columns of the summary.
        configs: resolved configuration by run id.
        evals: columns run_id, t (s of training wall time), val_loss (nats per token).
        baseline: dotted keys that make a run a baseline, as in a sweep file.
    """
    rows = rows.assign(baseline=None, **dict.fromkeys(RATIOS, math.nan))
    rows["baseline"] = rows["baseline"].astype(object)
    valid = rows[rows["valid"]]
    is_baseline = [bool(baseline) and matches(configs[run], baseline) for run in valid["run_id"]]
    candidates = valid[pd.Series(is_baseline, index=valid.index, dtype=bool)]
    fastest: dict[str, Any] = {}
    for _, row in candidates.sort_values("tokens_per_s", ascending=True, na_position="first").iterrows():
        fastest[_conditions(configs[row["run_id"]], row)] = row
    for index in valid.index:
        own = rows.loc[index]
        if (base := fastest.get(_conditions(configs[own["run_id"]], own))) is None:
            continue
        rows.loc[index, "baseline"] = base["run_id"]
        rows.loc[index, "volume_reduction"] = _ratio(base["wan_bytes_per_token"], own["wan_bytes_per_token"])
        rows.loc[index, "loss_gap"] = own["val_loss"] - base["val_loss"]
        if own["evidence"] == "counted":
            continue
        rows.loc[index, "speedup"] = _ratio(own["tokens_per_s"], base["tokens_per_s"])
        rows.loc[index, "speedup_to_loss"] = speedup_to_loss(
            evals[evals["run_id"] == base["run_id"]], evals[evals["run_id"] == own["run_id"]]
        )
    return rows


def speedup_to_loss(base: pd.DataFrame, own: pd.DataFrame) -> float:
    """Wall time of the baseline / of the method until the loss that both reach; NaN where not defined.

    That loss is the higher of the two last validation losses. Columns t (s) and val_loss (nats per token).
    """
    lasts = [losses.iloc[-1] for frame in (base, own) if len(losses := frame.sort_values("t")["val_loss"])]
    if len(lasts) < 2 or not all(math.isfinite(last) for last in lasts):
        return math.nan
    return _ratio(time_to_loss(base, max(lasts)), time_to_loss(own, max(lasts)))


def time_to_loss(evals: pd.DataFrame, target: float) -> float:
    """Seconds of training until the validation loss first is `target` or less, interpolated linearly.

    NaN where it never is. Columns t (s) and val_loss (nats per token).
    """
    ordered = evals.dropna(subset=["t", "val_loss"]).sort_values("t")
    t, loss = ordered["t"].to_numpy(float), ordered["val_loss"].to_numpy(float)
    below = np.flatnonzero(loss <= target)
    if not len(below):
        return math.nan
    first = int(below[0])
    if first == 0:
        return float(t[0])
    share = (loss[first - 1] - target) / (loss[first - 1] - loss[first])
    return float(t[first - 1] + share * (t[first] - t[first - 1]))


def _conditions(config: Mapping[str, Any], row: Any) -> str:
    """What two runs must share to be compared, as one string."""
    train, parallel = config.get("train") or {}, config.get("parallel") or {}
    sizes = train.get("batch_sizes") or [train.get("batch_size") or 0] * (parallel.get("replicas") or 0)
    sequences = sum(sizes)
    shared = [config.get(key) for key in ("model", "data", "compute", "topology")]
    return json.dumps(
        [*shared, sequences, train.get("steps"), str(row["seed"]), str(row["evidence"])],
        sort_keys=True,
        default=str,
    )


def _ratio(over: Any, under: Any) -> float:
    over, under = float(over), float(under)
    return (
        over / under if math.isfinite(over) and math.isfinite(under) and under > 0 and over > 0 else math.nan
    )
