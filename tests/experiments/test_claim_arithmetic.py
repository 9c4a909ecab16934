"""The published figures and what follows from them, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.claim.arithmetic import (
    Setting,
    candidates,
    mfu_of,
    sensitivity,
    speedup_map,
    tokens_per_s_at,
)

LARGE = Setting(params=107e9, tokens_per_s=3728, batch_tokens=16_384)
SMALL = Setting(params=1.316e9, tokens_per_s=23_880, batch_tokens=16_384)


def test_one_fp16_all_reduce_of_107b_over_a_gigabit_takes_1712_seconds():
    assert LARGE.exchange_s() == pytest.approx(107e9 * 2 * 8 / 1e9)
    assert LARGE.allreduce_tokens_per_s() == pytest.approx(16_384 / (16_384 / 3728 + 1712), rel=1e-9)
    assert LARGE.allreduce_tokens_per_s() == pytest.approx(9.55, abs=0.01)


def test_the_same_convention_gives_the_small_models_published_rate():
    assert SMALL.allreduce_tokens_per_s() == pytest.approx(754, abs=1)


@pytest.mark.parametrize(
    ("batch", "speedup"), [(16_384, 390), (65_536, 98), (262_144, 25), (1_048_576, 7), (4_194_304, 2.5)]
)
def test_hiding_everything_gains_less_the_larger_the_batch(batch, speedup):
    assert replace(LARGE, batch_tokens=batch).hidden_speedup() == pytest.approx(speedup, rel=0.03)


def test_an_accumulating_all_reduce_leaves_little():
    accumulating = replace(LARGE, accumulate=125)
    assert accumulating.allreduce_tokens_per_s() == pytest.approx(906, abs=1)
    assert 3728 / accumulating.allreduce_tokens_per_s() == pytest.approx(4.1, abs=0.05)
    assert accumulating.allreduce_tokens_per_s(overlapped=True) > accumulating.allreduce_tokens_per_s()


def test_int4_alone_hides_behind_125_steps():
    assert LARGE.gather_s(4) == pytest.approx(428)
    assert 125 * LARGE.step_s == pytest.approx(549, abs=1)
    assert LARGE.local_tokens_per_s(125, 4, one_step_late=True) == pytest.approx(3728)
    assert LARGE.local_tokens_per_s(125, 4, one_step_late=False) == pytest.approx(2095, abs=5)


def test_utilisation_in_the_claim_is_under_five_percent():
    assert mfu_of(3728, 160, 312, 107e9) == pytest.approx(0.048, abs=0.001)
    rate = tokens_per_s_at(0.4, 160, 312, 107e9)
    assert mfu_of(rate, 160, 312, 107e9) == pytest.approx(0.4)
    assert 125 * 16_384 / rate == pytest.approx(66, abs=1), "then a round is shorter than its exchange"


def test_few_unpublished_settings_explain_both_published_rates():
    found = candidates(LARGE, SMALL, (10.4, 745))
    assert {(c.replicas, c.bytes_per_value, c.batch_tokens) for c in found} >= {
        (2, 2.0, 16_384),
        (2, 4.0, 32_768),
    }
    assert all(c.batch_tokens <= 65_536 for c in found), "no usual batch does"


def test_the_map_holds_the_claim_where_utilisation_and_batch_are_small():
    table = speedup_map(
        LARGE,
        np.array([16_384.0, 4_194_304.0]),
        np.array([0.048, 0.4]),
        gpus=160,
        peak_tflops=312,
        local_steps=125,
        bits_per_value=4,
    )
    assert table[0, 0] == pytest.approx(390, rel=0.01)
    assert table[0, 1] == pytest.approx(2.5, rel=0.03)
    assert (np.diff(table, axis=0) >= 0).all(), "a faster cluster waits for a larger share of its time"


def test_sensitivity_changes_one_thing_at_a_time():
    rows = {row.changed: row.speedup for row in sensitivity(LARGE, 125, 4, gpus=160, peak_tflops=312)}
    assert rows["nothing"] == pytest.approx(390, rel=0.01)
    assert rows["batch of 65,536 tokens"] == pytest.approx(98, rel=0.01)
    assert rows["AllReduce in fp32"] == pytest.approx(2 * 390, rel=0.01)
    assert rows["AllReduce accumulates 125 steps"] == pytest.approx(4.1, abs=0.05)
