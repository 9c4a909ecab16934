"""Seconds and records: nothing twice, nothing lost."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from trainer import metrics, pipeline
from trainer.compression.rank_control import RankControl, effective_rank
from trainer.compressor_config import LowRankCompressor
from trainer.config import TrainConfig
from trainer.inner import build_inner, learning_rate
from trainer.metrics import JsonLines, Ledger, training_s, write_json
from trainer.model import Shape, build_stage
from trainer.pipeline import Pacer


class Clock:
    """A time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    monkeypatch.setattr(pipeline, "time", clock)
    return clock


def test_time_goes_to_the_innermost_span_and_to_one_only(clock):
    ledger = Ledger()
    clock.sleep(1)
    with ledger.span("bubble_s"):
        clock.sleep(2)
        with ledger.span("compute_s"):
            clock.sleep(4)
        clock.sleep(8)
        with pytest.raises(KeyError), ledger.span("compute_s"):
            clock.sleep(16)
            raise KeyError
    with ledger.span(metrics.EVALUATION):
        clock.sleep(32)
    read = ledger.read()
    assert (read["other_s"], read["bubble_s"], read["compute_s"]) == (1, 10, 20)
    assert training_s(read) == 31


def test_a_paced_chunk_takes_its_share_and_an_overrun_is_made_up_for(clock):
    pacer = Pacer(step_s=0.9, microbatches=2, stages=2)  # three slots of 0.3 s
    pacer.begin_step()
    for computed, expected in ((0.05, 0.1), (0.15, 0.15), (0.05, 0.05), (0.05, 0.1)):
        started = clock.now
        clock.sleep(computed)
        pacer.finish_chunk(started, 1 / 3)
        assert clock.now - started == pytest.approx(expected)
    pacer.charge(0.04)  # a loss computed between chunks shortens the next one
    clock.sleep(0.04)
    started = clock.now
    clock.sleep(0.01)
    pacer.finish_chunk(started, 1 / 3)
    assert clock.now - started == pytest.approx(0.06)
    pacer.end_step()
    assert pacer.overran_steps == 0


def test_interleaved_pieces_share_a_slot_and_shrink_the_bubble(clock):
    pacer = Pacer(step_s=0.9, microbatches=4, stages=2, pieces=2)  # 4.5 slots of 0.2 s
    pacer.begin_step()
    started = clock.now
    for _ in range(8):  # four microbatches through two pieces
        for share in (1 / 3, 2 / 3):
            pacer.finish_chunk(clock.now, share)
    assert clock.now - started == pytest.approx(0.8)


def test_a_step_that_is_too_slow_for_its_pace_is_counted(clock):
    pacer = Pacer(step_s=0.9, microbatches=2, stages=2)
    for computed in (0.15, 0.17):  # 0.6 s of pace in four chunks
        pacer.begin_step()
        for _ in range(4):
            started = clock.now
            clock.sleep(computed)
            pacer.finish_chunk(started, 1 / 4)
        pacer.end_step()
    assert pacer.overran_steps == 1


def test_records_are_complete_lines_as_soon_as_written(tmp_path):
    file = JsonLines(tmp_path / "a" / "x.jsonl")
    file.write({"loss": math.nan, "list": [math.inf, 1.5], "t": 0.1})
    assert json.loads((tmp_path / "a" / "x.jsonl").read_text()) == {
        "loss": None,
        "list": [None, 1.5],
        "t": 0.1,
    }
    file.close()


def test_a_summary_is_there_complete_or_not_at_all(tmp_path):
    write_json(tmp_path / "s.json", {"status": "done"})
    with pytest.raises(TypeError):
        write_json(tmp_path / "s.json", {"status": object()})
    assert json.loads((tmp_path / "s.json").read_text()) == {"status": "done"}
    assert [p.name for p in tmp_path.iterdir()] == ["s.json"]


def test_the_learning_rate_warms_up_and_falls_to_its_floor():
    config = TrainConfig(steps=100, lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(step, config) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(1, TrainConfig(steps=3, lr=1.0, warmup_steps=0)) <= 1.0


def test_wsd_stays_at_its_rate_until_the_last_share_of_the_steps():
    config = TrainConfig(
        steps=100, lr=1.0, warmup_steps=10, min_lr_ratio=0.1, schedule="wsd", decay_share=0.2
    )
    rates = [learning_rate(step, config) for step in range(1, 101)]
    assert rates[9:80] == pytest.approx([1.0] * 71)
    assert np.diff(rates[79:]) == pytest.approx([-0.9 / 20] * 20)
    assert rates[-1] == pytest.approx(0.1)


def test_a_constant_schedule_only_warms_up():
    config = TrainConfig(steps=100, lr=1.0, warmup_steps=10, schedule="constant")
    assert {learning_rate(step, config) for step in range(10, 101)} == {1.0}


def test_muon_moves_the_matrices_inside_the_layers_and_adamw_all_else():
    stage = build_stage(Shape(16, 8, 2, 2, 2, 12, tied=False), 0, 1, seq_len=4, seed=0)
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    muon, adamw = build_inner(dict(stage.named_parameters()), TrainConfig(inner="muon")).optimizers
    moved = [{names[id(p)] for group in o.param_groups for p in group["params"]} for o in (muon, adamw)]
    assert moved[0] == {name for name in names.values() if name.endswith("proj.weight")}
    assert moved[0] | moved[1] == set(names.values()) and not moved[0] & moved[1]


def test_effective_rank_is_the_fewest_columns_with_enough_energy():
    columns = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    assert [effective_rank(columns, 10.0, share) for share in (0.3, 0.4, 0.41, 0.9, 1.0)] == [1, 1, 2, 3, 4]
    assert effective_rank(columns, 20.0, 0.75) == 6, "columns like these on average: 15 of 20 need six"
    assert effective_rank(columns, 1000.0, 1.0) == 8, "never more than twice"
    assert effective_rank(columns, 0.0, 0.5) == 4
    assert effective_rank(torch.zeros(4), 10.0, 0.5) == 8


def test_rank_and_local_steps_stay_within_their_bounds():
    config = LowRankCompressor(
        name="lowrank-int4", rank=16, min_rank=3, max_rank=20, window=2, energy=0.5, min_local_steps=6
    )
    control = RankControl(config, local_steps=40)
    steep, flat = torch.tensor([1.0] + [0.0] * 15), torch.ones(16)
    control.observe(steep, 1.0)
    assert (control.rank, control.local_steps) == (8, 20), "mean of 16 and 1, rounded to even"
    control.observe(steep, 1.0)
    assert (control.rank, control.local_steps) == (3, 8)
    for _ in range(3):
        control.observe(flat, 64.0)
    assert (control.rank, control.local_steps) == (20, 50)
