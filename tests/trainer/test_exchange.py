"""Collectives and averagers over real gloo and TCP: right values, right bytes, same bits everywhere."""

import pytest

REPLICAS = [1, 2, 3, 4]
TOLERANCE = {"fp32": 1e-6, "bf16": 5e-2, "fp16": 5e-3}


@pytest.mark.parametrize("replicas", REPLICAS)
def test_means_are_right_identical_and_counted(fleet, replicas):
    ranks = fleet.run(replicas, "means", replicas=replicas, numels=[0, 1, 2, 7, 1000, 40001])
    for cases in zip(*ranks, strict=True):
        assert len({case["digest"] for case in cases}) == 1, cases
        for case in cases:
            assert case["error"] <= TOLERANCE[case["wire"]], case
            assert case["sent"] == case["planned"], case
            if replicas == 1 or case["case"].endswith(" 0"):
                assert case["sent"] == 0, case
        total = sum(case["sent"] for case in cases)
        assert (total > 0) == (replicas > 1 and not cases[0]["case"].endswith(" 0")), cases
    bits = {}
    for case in ranks[0]:
        assert bits.setdefault(case["case"], case["digest"]) == case["digest"], f"{case}: over gloo or TCP"


@pytest.mark.parametrize("replicas", REPLICAS)
def test_gathered_payloads_are_everybodys_in_rank_order(fleet, replicas):
    assert all(map(all, fleet.run(replicas, "gathers", replicas=replicas, numels=[0, 1, 5, 4097])))


COMPRESSORS = [
    {"name": "none"},
    {"name": "fp16", "error_feedback": True},
    {"name": "bf16"},
    {"name": "int8", "block": 16},
    {"name": "int4", "block": 16},
    {"name": "int4", "block": 16, "error_feedback": False},
    {"name": "lowrank", "rank": 3},
    {"name": "lowrank-int4", "rank": 3, "block": 16},
    {"name": "lowrank-int4", "rank": 200, "block": 16},
    {"name": "int2", "block": 8, "clip_sigma": 2.0},
    {"name": "fp4", "block": 16, "error_feedback": {"decay": 0.9}},
    {"name": "sign", "block": 64},
    {"name": "topk", "k": 5, "chunk": 128},
    {"name": "randomk", "fraction": 0.2},
    {"name": "randomk", "fraction": 0.2, "unbiased": True, "error_feedback": False},
    {"name": "dct", "size": 8, "k": 6, "error_feedback": {"decay": 0.999}},
    {
        "name": "chain",
        "of": [{"name": "randomk"}, {"name": "topk", "k": 20, "chunk": 100}, {"name": "int4", "block": 8}],
    },
    {
        "name": "chain",
        "of": [{"name": "topk"}, {"name": "int2", "block": 64}],
        "error_feedback": {"decay": 0.95},
    },
    {"name": "chain", "of": [{"name": "lowrank", "rank": 3}, {"name": "fp4", "block": 8}]},
    {"name": "chain", "of": [{"name": "lowrank", "rank": 3}, {"name": "topk"}, {"name": "int8"}]},
    {"name": "chain", "of": [{"name": "dct", "size": 8, "k": 9}, {"name": "sign", "block": 8}]},
]


@pytest.mark.parametrize("replicas", REPLICAS)
def test_averagers_keep_their_laws(fleet, replicas):
    ranks = fleet.run(replicas, "averaging", replicas=replicas, compressors=COMPRESSORS, rounds=3)
    for cases in zip(*ranks, strict=True):
        assert len({case["digest"] for case in cases}) == 1, cases
        for case in cases:
            assert case["sent_bytes"] == case["planned_bytes"], case  # law 5
            assert case["mean_error"] < 1e-5, case  # the mean is the mean of what was sent
            if case["feedback"]:
                assert case["feedback_error"] < 1e-5, case  # law 2
            assert case["relative_error"] == pytest.approx(case["true_relative_error"], rel=1e-4, abs=1e-6)
            if case["captured"] is not None:
                assert 0 < case["captured"] < 1.05, case


BOUNDS = {"min_rank": 2, "max_rank": 24, "energy": 0.9, "window": 2, "error_feedback": False}


def test_rank_and_local_steps_fall_with_a_steep_spectrum_and_rise_again_with_a_flat_one(fleet):
    steep, flat = [2.0] * 8, [0.3] * 10
    first, second = fleet.run(2, "spectrum", replicas=2, rank=16, decays=steep + flat, changes=BOUNDS)
    assert first == second, "every replica decides the same"
    ranks = [entry["rank"] for entry in first]
    assert ranks[7] <= 4 < 16, ranks
    assert ranks[-1] == 24, ranks
    assert all(entry["local_steps"] == max(1, entry["rank"]) for entry in first), "H_1 = rank_1 here"


def test_rank_rises_under_error_feedback_too(fleet):
    changes = {**BOUNDS, "error_feedback": True}
    (track,) = fleet.run(1, "spectrum", replicas=1, rank=4, decays=[0.5] * 12, changes=changes)
    assert track[-1]["rank"] > 4, track
