"""What each method promises beyond the laws that all of them keep."""

import itertools
import re

import method_references as plain
import numpy as np
import pytest
import reference
from methods_under_test import METHODS, changes
from trainings import TINY, merged

from trainer.config import TrainerConfig
from trainer.methods.pairs import partner_in_round
from trainer.presets import FOLDER, preset

ONE_OF_EACH = list({method["name"]: name for name, method in METHODS.items()}.values())


def short(name):
    """Three replicas, one stage, three steps."""
    return merged(changes(name), {"parallel": {"replicas": 3, "stages": 1}, "train": {"steps": 3}})


def config_of(**changes):
    return TrainerConfig.model_validate(merged(TINY, changes))


def assert_close(found, expected, atol=2e-4):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", METHODS)
def test_law_5_planned_bytes_are_sent_bytes_among_three_replicas_too(runs, name):
    run = runs(**short(name))
    for steps, summary in zip(run.steps, run.summaries, strict=True):
        sent = summary["payload_bytes"]["wan"]
        assert sent == summary["planned_wan_bytes"] == sum(s["payload_bytes"] for s in steps)
    assert sum(summary["payload_bytes"]["wan"] for summary in run.summaries) > 0


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_every_method_gives_the_same_losses_again(runs, name):
    first, second = runs(**short(name)), runs(**short(name), again=True)
    assert np.array_equal(first.losses(), second.losses())
    assert [s["outer_hash"] for s in first.summaries] == [s["outer_hash"] for s in second.summaries]


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_eager_updates_are_what_their_formula_says(runs, momentum):
    outer = {"name": "nesterov", "lr": 0.7, "momentum": momentum}
    method = {"name": "eager_diloco", "local_steps": 2, "outer": outer}
    found = runs(method=method, parallel={"stages": 1})
    losses, finals = plain.local_rounds(
        config_of(method=method), plain.eager(2, lambda: reference.nesterov(0.7, momentum))
    )
    np.testing.assert_allclose(found.losses(), losses, rtol=2e-4)
    assert_close(found.parameters, finals[0])


def test_eager_replicas_differ_under_way_and_agree_once_drained(runs):
    """With a plain outer step all that a replica used early has been replaced by the average at the end."""
    method = {"name": "eager_diloco", "local_steps": 2, "outer": {"name": "sgd", "lr": 0.7}}
    run = runs(method=method, parallel={"stages": 1})
    under_way = [[r["outer_hash"] for r in rounds[:-1]] for rounds in run.rounds]
    assert all(a != b for a, b in zip(*under_way, strict=True))
    _, finals = plain.local_rounds(
        config_of(method=method), plain.eager(2, lambda: reference.nesterov(0.7, 0.0))
    )
    assert_close(finals[0], finals[1], atol=1e-6)
    assert_close(run.parameters, finals[1])


def test_eager_with_one_replica_is_diloco(runs):
    """Its own share is then the whole average, at once."""
    alone = {"parallel": {"replicas": 1, "stages": 1}}
    eager = runs(method={"name": "eager_diloco", "local_steps": 2}, **alone)
    diloco = runs(method={"name": "diloco", "local_steps": 2}, **alone)
    np.testing.assert_allclose(eager.losses(), diloco.losses(), rtol=1e-4)


@pytest.mark.parametrize("replicas", [2, 3])
def test_noloco_moves_as_its_formula_says(runs, replicas):
    method = {"name": "noloco", "local_steps": 2}
    parallel = {"replicas": replicas, "stages": 1}
    found = runs(method=method, parallel=parallel)
    config = config_of(method=method, parallel=parallel)
    losses, finals = plain.local_rounds(config, plain.gossip(config))
    np.testing.assert_allclose(found.losses(), losses, rtol=2e-4)
    assert_close(found.parameters, finals[0])


def test_noloco_neither_creates_nor_destroys(runs):
    """Every replica having a partner, the mean of all slow weights moves as by the mean pseudo-gradient."""
    method = {"name": "noloco", "local_steps": 2, "momentum": 0.5}
    config = config_of(method=method, parallel={"replicas": 4, "stages": 1})
    means, deltas = [], []

    def watched(initial):
        close, starts = plain.gossip(config)(initial), [initial] * 4

        def watch(ends, last):
            deltas.append(reference.average([plain.minus(s, e) for s, e in zip(starts, ends, strict=True)]))
            starts[:] = close(ends, last)
            means.append(reference.average(starts))
            return starts

        means.append(initial)
        return watch

    _, finals = plain.local_rounds(config, watched)
    velocity = [0 * p for p in means[0]]
    for before, after, delta in zip(means, means[1:], deltas, strict=False):
        velocity = [0.5 * v - 0.7 * d for v, d in zip(velocity, delta, strict=True)]
        for b, a, v in zip(before, after, velocity, strict=True):
            np.testing.assert_allclose(a - b, v, atol=1e-6)
    assert_close(runs(method=method, parallel={"replicas": 4, "stages": 1}).parameters, finals[0])


@pytest.mark.parametrize("size", range(1, 8))
def test_partners_are_mutual_change_and_leave_out_one_at_most(size):
    met = set()
    for number in range(40):
        partners = [partner_in_round(i, size, number, seed=3) for i in range(size)]
        assert all(partners[partner] == i for i, partner in enumerate(partners))
        assert sum(partner == i for i, partner in enumerate(partners)) == size % 2
        met |= {(i, partner) for i, partner in enumerate(partners)}
    assert met >= set(itertools.permutations(range(size), 2)), "everybody meets everybody"


ABLATIONS = {
    "overlap": {"overlap": {"delay_rounds": 0}},
    "low rank": {"compressor": {"name": "int4", "block": 32}},
    "quantisation": {"compressor": {**METHODS["dilocox"]["compressor"], "name": "lowrank"}},
    "feedback": {"compressor": {**METHODS["dilocox"]["compressor"], "error_feedback": False}},
    "adaptivity": {"compressor": {**METHODS["dilocox"]["compressor"], "adaptive": False}},
}


@pytest.mark.parametrize("part", ABLATIONS)
def test_each_part_of_dilocox_can_be_taken_out_and_matters(runs, part):
    whole = runs(method=METHODS["dilocox"], train={"steps": 14})
    without = runs(method={**METHODS["dilocox"], **ABLATIONS[part]}, train={"steps": 14})
    assert not np.array_equal(whole.losses(), without.losses())


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_method_named_alone_has_its_presets_settings(file):
    """Reads every preset, so that one with a key its method lacks fails here too."""
    written = preset(file.stem)
    assert set(written) == {"source", "does", "trained_with", "method"}
    alone, spelled = (
        TrainerConfig.model_validate({"method": method, "train": {"inner": "sgd"}, "model": {"layers": 3}})
        for method in ({"name": file.stem}, {"name": file.stem, **written["method"]})
    )
    assert alone.method == spelled.method


def test_one_key_of_a_section_is_laid_upon_the_presets(runs):
    changed = TrainerConfig.model_validate({"method": {"name": "dilocox", "compressor": {"block": 64}}})
    assert (changed.method.compressor.name, changed.method.compressor.block) == ("lowrank-int4", 64)
    other = TrainerConfig.model_validate({"method": {"name": "dilocox", "compressor": {"name": "int8"}}})
    assert other.method.compressor.block == 128


def test_overlap_with_backward_changes_no_bit(runs):
    buckets = {"name": "allreduce", "bucket_mb": 0.02}
    train = {"steps": 5, "grad_clip": 0.5}
    for accumulate in (1, 2):
        plainly = runs(method={**buckets, "accumulate": accumulate}, train=train)
        beside = runs(method={**buckets, "accumulate": accumulate, "overlap": True}, train=train)
        assert np.array_equal(plainly.losses(), beside.losses())
        assert plainly.summaries[0]["outer_hash"] == beside.summaries[0]["outer_hash"]
    whole = runs(method={"name": "allreduce"}, train=train)
    assert np.array_equal(runs(method=buckets, train=train).losses(), whole.losses()), (
        "cutting adds nothing up"
    )


def test_overlap_with_backward_hides_the_exchange_under_paced_compute(runs):
    """Buckets are handed over as backward goes on, so they have arrived when it ends."""
    run = runs(
        method={"name": "allreduce", "bucket_mb": 0.02, "overlap": True},
        compute={"mode": "paced", "step_s": 0.6},
        train={"steps": 4},
        parallel={"stages": 1},
    )
    plainly = runs(
        method={"name": "allreduce", "bucket_mb": 0.02}, train={"steps": 4}, parallel={"stages": 1}
    )
    assert np.array_equal(run.losses(), plainly.losses())


def test_accumulated_steps_are_one_update_with_the_mean_gradient(runs):
    """7 steps, A = 3: updates after 3, 6 and 7, at those steps' rates; every batch at the weights of its time."""
    changes = {"train": {"inner": "sgd", "lr": 0.5}}
    method = {"name": "allreduce", "accumulate": 3}
    found = runs(method=method, **changes)
    losses, parameters = plain.accumulated(config_of(method=method, **changes))
    np.testing.assert_allclose(found.global_losses(), losses, rtol=1e-5)
    assert_close(found.parameters, parameters, atol=1e-5)
    sent = [step["payload_bytes"] > 0 for step in found.steps[0]]
    assert sent == [False, False, True, False, False, True, True]
    assert [step["tokens"] for step in found.steps[0]] == [128 * n for n in range(1, 8)]


def test_powersgd_is_dense_first_and_then_sends_factors(runs):
    found = runs(method=METHODS["powersgd"])
    dense = runs(method={"name": "allreduce", "collective": "naive"})
    np.testing.assert_allclose(found.losses()[:, :4], dense.losses()[:, :4], rtol=1e-5)
    assert not np.allclose(found.losses()[:, 5:], dense.losses()[:, 5:], rtol=1e-5)
    sent = [step["payload_bytes"] for step in found.steps[0]]
    assert sent[:3] == [step["payload_bytes"] for step in dense.steps[0]][:3]
    assert len(set(sent[3:])) == 1 and sent[3] < sent[0] / 3


AVERAGING = {"local_steps": 1, "compressor": {"name": "none"}, "outer": {"name": "sgd", "lr": 1.0}}
H_IS_1 = {
    "local_sgd": AVERAGING,
    "opendiloco": AVERAGING,
    "intellect1": AVERAGING,
    "sparse_loco": AVERAGING,
    "eager_diloco": {**AVERAGING, "overlap": {"delay_rounds": 0}},
    "dilocox": {**AVERAGING, "overlap": {"delay_rounds": 0}},
    "cocktail_sgd": {**AVERAGING, "delay_rounds": 0},
    "noloco": {"local_steps": 1, "lr": 1.0, "momentum": 0.0},
}


@pytest.mark.parametrize("name", H_IS_1)
def test_law_1_holds_for_every_method_with_local_steps(runs, name):
    """H = 1, nothing compressed, plain averaging, inner SGD: data-parallel SGD."""
    sgd = {"train": {"inner": "sgd", "lr": 0.5}}
    found = runs(method={"name": name, **H_IS_1[name]}, **sgd)
    losses, parameters = reference.big_batch(config_of(**sgd))
    np.testing.assert_allclose(found.global_losses(), losses, rtol=1e-5)
    assert_close(found.parameters, parameters, atol=1e-5)


def test_cocktail_sgd_leaves_its_own_unsent_progress_in_its_weights(runs):
    """With one replica the weights then are those of plain training, whatever little has been sent."""
    alone = {"parallel": {"replicas": 1, "stages": 1}}
    cocktail = runs(method={"name": "cocktail_sgd"}, **alone)
    plainly = runs(method={"name": "allreduce"}, **alone)
    np.testing.assert_allclose(cocktail.losses(), plainly.losses(), rtol=1e-4)
    assert not np.allclose(cocktail.validation()[1:], plainly.validation()[1:], rtol=1e-3), (
        "theta lags behind"
    )


@pytest.mark.parametrize(("local_steps", "late", "alpha"), [(3, 1, 0.5), (6, 2, 0.0)])
def test_streaming_fragments_are_what_their_schedule_says(runs, local_steps, late, alpha):
    method = {
        "name": "streaming_diloco",
        "local_steps": local_steps,
        "fragment_layers": 1,
        "overlap_steps": late,
        "merge_alpha": alpha,
        "compressor": {"name": "none"},
    }
    train = {"steps": 11}
    found = runs(method=method, train=train)
    losses, theta = plain.streaming(config_of(method=method, train=train))
    np.testing.assert_allclose(found.losses(), losses, rtol=2e-4)
    assert_close(found.parameters, theta)


def test_streaming_sends_an_even_share_at_a_time(runs):
    """The peak is a fragment, not the model; a stage takes part in its own fragments only."""
    method = METHODS["streaming_diloco"]
    run = runs(method=method, parallel={"stages": 1})
    sent = [r["payload_bytes"] for r in run.rounds[0]]
    whole = sum(sent[-3:])
    assert max(sent) < 0.7 * whole
    assert [r["step"] for r in run.rounds[0]][:5] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"local_steps": 2, "fragment_layers": 1},
            "method.local_steps: found 2, allowed at least the number",
        ),
        (
            {"local_steps": 6, "fragment_layers": 1, "overlap_steps": 3},
            "method.overlap_steps: found 3, allowed at most",
        ),
    ],
)
def test_fragments_that_would_overlap_each_other_are_refused(changed, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        config_of(method={"name": "streaming_diloco", **changed})


def test_demo_refuses_an_optimiser_that_would_normalise_its_sign_again():
    with pytest.raises(ValueError, match=r"train\.inner: found 'adamw', allowed sgd with method demo"):
        config_of(method={"name": "demo"})


def test_demo_without_momentum_and_compression_is_the_sign_of_the_mean_gradient(runs):
    sgd = {"train": {"inner": "sgd", "lr": 0.002}}
    found = runs(method={"name": "demo", "momentum": 0.0, "compressor": {"name": "none"}}, **sgd)
    np.testing.assert_allclose(found.global_losses(), plain.sign_descent(config_of(**sgd)), rtol=1e-4)
