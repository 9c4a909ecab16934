"""Intervals that hold the truth as often as they say, pairs that cancel a seed's luck, and crossings of a loss."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.statistics import estimate, paired_difference, way_to_loss

FLOATS = st.floats(-100, 100)


@settings(max_examples=15, deadline=None)
@given(st.lists(FLOATS, min_size=3, max_size=12), FLOATS, st.floats(0.1, 10))
def test_an_interval_moves_and_stretches_with_its_values(values, shift, scale):
    found = estimate(values)
    moved = estimate([shift + scale * value for value in values])
    assert found.low <= found.mean + 1e-9 and found.mean <= found.high + 1e-9
    for a, b in ((found.low, moved.low), (found.mean, moved.mean), (found.high, moved.high)):
        assert b == pytest.approx(shift + scale * a, abs=1e-6 * scale * 100 + 1e-6)


@settings(max_examples=5, deadline=None)
@given(st.permutations([2.0, 2.1, 2.4, 3.0, 2.2]))
def test_the_order_of_seeds_does_not_matter_much(values):
    first, second = estimate([2.0, 2.1, 2.4, 3.0, 2.2]), estimate(values)
    assert second.mean == pytest.approx(first.mean)
    assert second.low == pytest.approx(first.low, abs=0.03) and second.high == pytest.approx(
        first.high, abs=0.03
    )


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    """Binomial: 80 samples of 12 normal values; 95 % nominal, percentile intervals run a bit below."""
    rng = np.random.default_rng(0)
    samples = rng.normal(5.0, 1.0, (80, 12))
    covered = sum(e.low <= 5.0 <= e.high for e in map(estimate, samples.tolist()))
    assert 66 <= covered <= 79
    few = sum(e.low <= 5.0 <= e.high for e in map(estimate, samples[:, :3].tolist()))
    assert few < covered, "three seeds promise too much, as the docstring says"


def test_two_values_have_a_range_and_one_has_itself():
    assert (estimate([1.0, 3.0]).low, estimate([1.0, 3.0]).high) == (1.0, 3.0)
    assert not estimate([1.0, 3.0]).is_interval and estimate([1.0, 2.0, 3.0]).is_interval
    assert estimate([2.0, math.nan]) == estimate([2.0])
    assert estimate([]).count == 0 and math.isnan(estimate([]).mean)


def test_a_difference_is_taken_seed_by_seed():
    luck = {0: 0.0, 1: 5.0, 2: -7.0, 3: 2.0}
    rows = [
        {"seed": seed, "valid": True, "method": method, "val_loss": base + luck[seed]}
        for method, base in (("a", 2.0), ("b", 2.5))
        for seed in luck
    ]
    runs = pd.DataFrame(rows)
    found = paired_difference(runs, "val_loss", runs["method"] == "b", runs["method"] == "a")
    assert (found.mean, found.low, found.high, found.count) == pytest.approx((0.5, 0.5, 0.5, 4))
    runs.loc[(runs["method"] == "b") & (runs["seed"] == 2), "valid"] = False
    assert paired_difference(runs, "val_loss", runs["method"] == "b", runs["method"] == "a").count == 3


def test_the_way_to_a_loss_is_interpolated_and_nan_where_it_was_not_reached():
    evals = pd.DataFrame(
        {
            "run_id": ["a"] * 3 + ["b"] * 2,
            "tokens": [0, 100, 200, 0, 100],
            "t": [0.0, 10.0, 30.0, 0.0, 10.0],
            "val_loss": [5.0, 3.0, 2.0, 5.0, 4.0],
            "wan_wire_bytes": [0.0, 1000.0, 2000.0, 0.0, math.nan],
        }
    )
    found = way_to_loss(evals, 2.5).set_index("run_id")
    assert found.loc["a"].tolist() == pytest.approx([150.0, 20.0, 1500.0])
    assert found.loc["b"].isna().all()
    assert way_to_loss(evals, 5.5).set_index("run_id").loc["a", "tokens"] == 0
