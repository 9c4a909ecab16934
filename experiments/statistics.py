"""What several seeds say together: intervals, differences paired by seed, and the way to a loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 9999
FEWEST = 3
"""Values below which an interval would say nothing: with two, their range is all there is."""


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds. `low` and `high`: 95 % bootstrap interval of the mean, or the range below three values."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def is_interval(self) -> bool:
        """Whether low and high are an interval; otherwise they are the range."""
        return self.count >= FEWEST


def estimate(values: Sequence[float], seed: int = 0) -> Estimate:
    """Mean and 95 % interval by resampling `values`; those that are not finite are left out.

    Percentile bootstrap. With three to five seeds such intervals are known to be too narrow (they cover the
    truth 75 to 90 % of the time): read them as the least doubt there is.
    """
    finite = np.array([value for value in values if math.isfinite(value)], dtype=float)
    if not len(finite):
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(finite.mean())
    if len(finite) < FEWEST or np.ptp(finite) == 0:
        return Estimate(mean, float(finite.min()), float(finite.max()), len(finite))
    found = stats.bootstrap(
        (finite,),
        np.mean,
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        method="percentile",  # BCa jumps with ties and outliers among few values
        rng=np.random.default_rng(seed),
        vectorized=True,
    ).confidence_interval
    return Estimate(mean, float(found.low), float(found.high), len(finite))


def paired_difference(runs: pd.DataFrame, column: str, one: pd.Series, other: pd.Series) -> Estimate:
    """Mean and interval of `column` of the runs `one` minus that of the runs `other`, run by run of equal seed.

    Pairing takes the seed's own luck (initial weights, order of data) out of the comparison.

    Args:
        runs: summary rows with seed, valid and `column`.
        one: boolean mask over `runs`.
        other: boolean mask over `runs`.
    """
    valid = runs["valid"].astype(bool)
    left = runs[one & valid].set_index("seed")[column].astype(float)
    right = runs[other & valid].set_index("seed")[column].astype(float)
    shared = left.index.intersection(right.index)
    return estimate([float(left.loc[seed]) - float(right.loc[seed]) for seed in shared])


def way_to_loss(evals: pd.DataFrame, target: float) -> pd.DataFrame:
    """What each run needed until its validation loss first was `target` or less.

    Args:
        evals: rows of every run's evaluations: run_id, tokens, t (s), val_loss (nats per token), wan_wire_bytes.
        target: nats per token.

    Returns: one row per run: run_id, tokens, t, wan_wire_bytes, interpolated linearly between the evaluations
    around the crossing; NaN where the loss was never reached.
    """
    measures = ("tokens", "t", "wan_wire_bytes")
    rows = []
    for run_id, own in evals.groupby("run_id", sort=True):
        ordered = own.dropna(subset=["val_loss"]).sort_values("t")
        losses = ordered["val_loss"].to_numpy(float)
        below = np.flatnonzero(losses <= target)
        row: dict[str, object] = {"run_id": run_id, **dict.fromkeys(measures, math.nan)}
        if len(below):
            after = int(below[0])
            before = max(after - 1, 0)
            drop = losses[before] - losses[after]
            share = (losses[before] - target) / drop if drop > 0 else 0.0
            for measure in measures:
                series = ordered[measure].to_numpy(float)
                row[measure] = float(series[before] + share * (series[after] - series[before]))
        rows.append(row)
    return pd.DataFrame(rows, columns=["run_id", *measures])
