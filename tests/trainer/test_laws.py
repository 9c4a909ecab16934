"""The laws that every method keeps, on real processes over real gloo."""

import numpy as np
import pytest
import reference
from methods_under_test import ALLREDUCE, DILOCO, DILOCOX, METHODS, NO_CONSENSUS, changes
from trainings import TINY, Run, Runs, merged

from trainer.config import TrainerConfig

CONSENSUS = [name for name in METHODS if name not in NO_CONSENSUS]


@pytest.fixture(params=METHODS)
def run(request: pytest.FixtureRequest, runs: Runs) -> Run:
    return runs(**changes(request.param))


def config_of(**changes):
    return TrainerConfig.model_validate(merged(TINY, changes))


def assert_same_parameters(found: Run, expected: dict[str, np.ndarray], atol: float) -> None:
    assert found.parameters.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found.parameters[name], value, rtol=0, atol=atol, err_msg=name)


SGD = {"inner": "sgd", "lr": 0.5}
AVERAGING = {"name": "diloco", "local_steps": 1, "outer": {"name": "sgd", "lr": 1.0}}


def test_law_1_one_local_sgd_step_with_outer_rate_1_is_data_parallel_sgd(runs):
    local = runs(method=AVERAGING, train=SGD)
    data_parallel = runs(method=ALLREDUCE, train=SGD)
    losses, parameters = reference.big_batch(config_of(train=SGD))
    np.testing.assert_allclose(local.global_losses(), losses, rtol=1e-5)
    np.testing.assert_allclose(data_parallel.global_losses(), losses, rtol=1e-5)
    assert losses[-1] < losses[0] - 0.1, "the comparison needs weights that move"
    assert_same_parameters(local, parameters, atol=1e-5)
    assert_same_parameters(data_parallel, parameters, atol=1e-5)


@pytest.mark.parametrize("progress", ["keep", "discard"])
def test_law_3_a_delayed_delta_is_applied_once_one_round_later_with_the_right_sign(runs, progress):
    method = {
        "name": "dilocox",
        "local_steps": 2,
        "overlap": {"delay_rounds": 1, "progress": progress},
        "compressor": {"name": "none"},
        "outer": {"name": "nesterov", "lr": 0.7, "momentum": 0.6},
    }
    found = runs(method=method)
    losses, theta = reference.delayed(config_of(method=method), reference.nesterov(0.7, 0.6))
    np.testing.assert_allclose(found.losses(), losses, rtol=2e-4)
    assert_same_parameters(found, theta, atol=2e-4)
    applied = [(r["round"], r["local_steps"], r["step"]) for r in found.rounds[0]]
    assert applied == [(1, 2, 4), (2, 2, 6), (3, 2, 7), (4, 1, 7)]


def test_law_3_reference_tells_a_missed_round_apart(runs):
    """The comparison above would notice a delta applied a round early."""
    method = {**DILOCOX, "compressor": {"name": "none"}}
    delayed, synchronous = runs(method=method), runs(method={**method, "overlap": {"delay_rounds": 0}})
    assert np.abs(delayed.losses() - synchronous.losses()).max() > 1e-2


def test_law_4_losses_do_not_depend_on_the_number_of_stages(runs):
    two = runs(method=DILOCO)
    for parallel in ({"stages": 1}, {"replicas": 1, "stages": 3, "microbatches": 4}):
        # one replica sees only its own part of the batch, so it is compared with one replica
        alone = parallel.get("replicas") == 1
        base = runs(method=DILOCO, parallel={**parallel, "stages": 1}) if alone else two
        other = runs(method=DILOCO, parallel={**TINY["parallel"], **parallel})
        np.testing.assert_allclose(other.losses(), base.losses(), rtol=1e-5)
        np.testing.assert_allclose(other.validation(), base.validation(), rtol=1e-5)


def test_law_4_gpipe_and_1f1b_give_the_same_losses(runs):
    gpipe = runs(method=ALLREDUCE, parallel={"schedule": "gpipe"})
    np.testing.assert_allclose(gpipe.losses(), runs(method=ALLREDUCE).losses(), rtol=1e-6)


def test_law_4_allreduce_at_a_fixed_global_batch_does_not_depend_on_replicas(runs):
    two = runs(method=ALLREDUCE)
    one = runs(method=ALLREDUCE, parallel={"replicas": 1}, train={"batch_size": 8})
    four = runs(method=ALLREDUCE, parallel={"replicas": 4, "stages": 1}, train={"batch_size": 2})
    for other in (one, four):
        np.testing.assert_allclose(other.global_losses(), two.global_losses(), rtol=1e-5)
        np.testing.assert_allclose(other.validation(), two.validation(), rtol=1e-4)


def test_clipping_is_by_the_norm_over_all_stages(runs):
    clipped = {"grad_clip": 0.05}
    two = runs(method=ALLREDUCE, train=clipped)
    one = runs(method=ALLREDUCE, train=clipped, parallel={"stages": 1})
    np.testing.assert_allclose(one.losses(), two.losses(), rtol=1e-5)
    sgd = runs(method=ALLREDUCE, train={**SGD, **clipped})
    assert np.abs(sgd.losses() - runs(method=ALLREDUCE, train=SGD).losses()).max() > 1e-2
    assert two.steps[0][0]["lan_payload_bytes"] - runs(method=ALLREDUCE).steps[0][0]["lan_payload_bytes"] == 8


def test_law_5_bytes_sent_are_the_bytes_planned(run):
    for steps, rounds, summary in zip(run.steps, run.rounds, run.summaries, strict=True):
        assert all(r["payload_bytes"] == r["planned_bytes"] for r in rounds)
        assert sum(s["payload_bytes"] for s in steps) == summary["payload_bytes"]["wan"] > 0
        assert summary["payload_bytes"]["wan"] == summary["planned_wan_bytes"]
        assert sum(s["lan_payload_bytes"] for s in steps) == summary["payload_bytes"]["lan"] > 0
        if rounds:
            assert sum(r["payload_bytes"] for r in rounds) == summary["payload_bytes"]["wan"]


@pytest.mark.parametrize(("wire", "width"), [("fp32", 4), ("bf16", 2)])
def test_law_5_allreduce_sends_its_gradient_once_each_way(runs, wire, width):
    run = runs(method={**ALLREDUCE, "wire": wire})
    for steps, summary in zip(run.steps, run.summaries, strict=True):
        assert {s["payload_bytes"] for s in steps} == {summary["params_stage"] * width}


def test_law_5_pipeline_payload_is_activations_and_their_gradients(runs):
    run = runs(method=ALLREDUCE)
    activation = 4 * 16 * 32 * 4  # sequences x tokens x width x fp32
    assert {s["lan_payload_bytes"] for steps in run.steps for s in steps} == {activation}


@pytest.mark.parametrize("name", CONSENSUS)
def test_law_6_replicas_hold_identical_outer_parameters_after_every_round(runs, name):
    run = runs(**changes(name))
    for stage in range(run.stages):
        peers = [stage + replica * run.stages for replica in range(run.replicas)]
        assert len({run.summaries[rank]["outer_hash"] for rank in peers}) == 1
        histories = [[r["outer_hash"] for r in run.rounds[rank]] for rank in peers]
        assert all(history == histories[0] for history in histories)
        assert len(set(histories[0])) == len(histories[0]), "every round moves the parameters"


def test_same_configuration_gives_the_same_bits(runs):
    for method in (ALLREDUCE, DILOCOX):
        first, second = runs(method=method), runs(method=method, again=True)
        assert np.array_equal(first.losses(), second.losses())
        assert np.array_equal(first.validation(), second.validation())
        for a, b in zip(first.summaries, second.summaries, strict=True):
            assert a["outer_hash"] == b["outer_hash"]


def test_another_seed_gives_another_run(runs):
    assert np.abs(runs(method=DILOCO, seed=1).losses() - runs(method=DILOCO).losses()).max() > 1e-2


BUCKETS = ("compute_s", "bubble_s", "compress_s", "exposed_comm_s", "checkpoint_s", "other_s")


def test_every_second_is_in_a_bucket(run):
    for steps, summary in zip(run.steps, run.summaries, strict=True):
        previous = 0.0
        for record in steps:
            assert all(record[bucket] >= 0 for bucket in BUCKETS)
            wall = record["t"] - previous
            assert sum(record[bucket] for bucket in BUCKETS) == pytest.approx(wall, abs=1e-6)
            previous = record["t"]
        assert summary["wall_s"] == previous
        for bucket in BUCKETS:
            assert sum(record[bucket] for record in steps) == pytest.approx(summary[bucket], abs=1e-6)
        assert summary["compute_s"] > 0


def test_local_steps_follow_the_rank_and_all_ranks_agree(runs):
    run = runs(method=DILOCOX, train={"steps": 20})
    plans = [[(r["local_steps"], r["rank_r"], r["step"]) for r in rounds] for rounds in run.rounds]
    assert all(plan == plans[0] for plan in plans)
    rounds = run.rounds[0]
    assert all(r["effective_rank"] >= 1 for r in rounds)
    assert sum(r["local_steps"] for r in rounds) == 20, "the last, partial round is exchanged too"
    # what the exchange of round t taught is known at the end of round t+1: rank of its exchange, H of t+2
    for number, record in enumerate(rounds[:-3]):
        rank = rounds[number + 1]["rank_r"]
        assert record["next_local_steps"] == max(1, round(2 * rank / 4))
        assert rounds[number + 2]["local_steps"] == record["next_local_steps"]
    assert {r["rank_r"] for r in rounds} != {4}, "the comparison needs a rank that moves"
    assert {r["local_steps"] for r in rounds[:-1]} != {2}, "and with it H"


def test_validation_is_of_outer_parameters_at_synchronisation_points(runs):
    """eval.every is 3 and H is 2: due at 3 and 6, so measured at 4 and 6, and at both ends."""
    assert [e["step"] for e in runs(method=DILOCO).evals] == [0, 4, 6, 7]
    assert [e["step"] for e in runs(method=ALLREDUCE).evals] == [0, 3, 6, 7]
    delayed = runs(method=DILOCOX)
    by_step = {e["step"]: e["val_loss"] for e in delayed.evals}
    # under one-step delay nothing is applied before the end of round 2
    early = runs(method=DILOCOX, eval={"every": 1}).evals
    assert [e["step"] for e in early][:3] == [0, 2, 4]
    assert early[0]["val_loss"] == early[1]["val_loss"] != early[2]["val_loss"]
    assert by_step[7] == delayed.summaries[1]["val_loss"]


def test_bf16_trains_close_to_fp32(runs):
    bf16 = runs(method=ALLREDUCE, train={"dtype": "bf16"})
    assert not np.array_equal(bf16.losses(), runs(method=ALLREDUCE).losses())
    np.testing.assert_allclose(bf16.losses(), runs(method=ALLREDUCE).losses(), rtol=2e-2)


def test_paced_steps_train_the_same_and_take_their_time(runs):
    paced = runs(method=DILOCO, compute={"mode": "paced", "step_s": 0.3}, train={"steps": 4})
    real = runs(method=DILOCO, train={"steps": 4})
    assert np.array_equal(paced.losses(), real.losses())
    for steps in paced.steps:
        # two microbatches of three slots of 0.1 s each; a sleep never ends early
        assert all(s["compute_s"] >= 0.2 - 1e-3 for s in steps)
    assert all(s["wall_s"] >= 4 * 0.3 - 1e-3 for s in paced.summaries[:1])


UNEVEN = {"batch_sizes": [6, 2]}


@pytest.mark.parametrize("method", [ALLREDUCE, {**ALLREDUCE, "collective": "naive"}, AVERAGING])
def test_law_1_uneven_batches_weigh_by_tokens(runs, method):
    """Replicas of 6 and 2 sequences make the same step as one process on all 8."""
    found = runs(method=method, train={**SGD, **UNEVEN})
    _, parameters = reference.big_batch(config_of(train=SGD))
    assert_same_parameters(found, parameters, atol=1e-5)
    even = runs(method=method, train=SGD)
    assert not np.array_equal(found.losses(), even.losses()), "the comparison needs other parts of the batch"
    assert found.steps[0][0]["tokens"] == even.steps[0][0]["tokens"]


@pytest.mark.parametrize("progress", ["keep", "eager"])
def test_uneven_batches_keep_replicas_together_under_delay(runs, progress):
    method = {**DILOCOX, "overlap": {"delay_rounds": 1, "progress": progress}}
    found = runs(method=method, train=UNEVEN)
    assert len({found.summaries[rank]["outer_hash"] for rank in (0, 2)}) == (1 if progress == "keep" else 2)
    assert found.global_losses()[-1] < found.global_losses()[0]


TWO_EACH = {"data_parallel": 2}


@pytest.mark.parametrize("stages", [1, 2])
def test_law_4_data_parallel_ranks_inside_a_replica_train_as_one(runs, stages):
    """Two ranks of half a batch each, averaged over the LAN in every step, against one rank of the whole."""
    one = runs(method=DILOCO, parallel={"stages": stages})
    two = runs(method=DILOCO, parallel={"stages": stages, **TWO_EACH})
    np.testing.assert_allclose(two.global_losses(), one.global_losses(), rtol=1e-5)
    np.testing.assert_allclose(two.validation(), one.validation(), rtol=1e-5)
    assert_same_parameters(two, one.parameters, atol=2e-5)


@pytest.mark.parametrize(
    "method",
    [
        ALLREDUCE,
        {**ALLREDUCE, "collective": "naive"},
        DILOCO | {"compressor": {"name": "int4", "block": 32}},
        DILOCOX,
    ],
)
def test_data_parallel_ranks_stay_identical_and_cross_the_wan_once(runs, method):
    one = runs(method=method, parallel={"stages": 1})
    two = runs(method=method, parallel={"stages": 1, **TWO_EACH})
    assert len({summary["outer_hash"] for summary in two.summaries}) == 1
    wan = [summary["payload_bytes"]["wan"] for summary in two.summaries]
    assert wan[0] == one.summaries[0]["payload_bytes"]["wan"] and wan[1] == 0
    assert wan[2] == one.summaries[1]["payload_bytes"]["wan"] and wan[3] == 0
    assert [s["planned_wan_bytes"] for s in two.summaries] == wan
    params = two.summaries[0]["params_stage"]
    lan = [summary["payload_bytes"]["lan"] for summary in two.summaries]
    # each member hands its gradient to the other in every step; the first besides what came across the WAN
    assert lan[1] == lan[3] == 7 * 4 * params
    # what two replicas receive is as much as they send, except that a naive mean is handed on whole
    relayed = 7 * 4 * params if method.get("collective") == "naive" else wan[0]
    assert lan[0] == lan[1] + relayed


def test_a_lone_replica_of_two_ranks_needs_no_wan(runs):
    alone = runs(method=DILOCO, parallel={"replicas": 1, "stages": 1, **TWO_EACH})
    assert [summary["payload_bytes"]["wan"] for summary in alone.summaries] == [0, 0]
    assert len({summary["outer_hash"] for summary in alone.summaries}) == 1


def test_law_4_interleaved_pieces_give_the_same_losses_and_count_their_hops(runs):
    four = {"layers": 4}
    plain = runs(method=DILOCO, model=four, parallel={"schedule": "1f1b"})
    interleaved = runs(method=DILOCO, model=four, parallel={"schedule": "interleaved"})
    np.testing.assert_allclose(interleaved.losses(), plain.losses(), rtol=1e-5)
    np.testing.assert_allclose(interleaved.validation(), plain.validation(), rtol=1e-5)
    assert_same_parameters(interleaved, plain.parameters, atol=2e-5)
    activation = 4 * 16 * 32 * 4  # sequences x tokens x width x fp32; pieces 0 2 | 1 3 make three hops
    hops = [{s["lan_payload_bytes"] // activation for s in steps} for steps in interleaved.steps]
    assert hops == [{3}, {3}, {3}, {3}]


def test_muon_trains_and_does_not_depend_on_the_number_of_stages(runs):
    muon = {"inner": "muon", "lr": 2.0e-2}
    two, one = runs(method=ALLREDUCE, train=muon), runs(method=ALLREDUCE, train=muon, parallel={"stages": 1})
    np.testing.assert_allclose(one.losses(), two.losses(), rtol=1e-3)
    assert two.global_losses()[-1] < two.global_losses()[0] - 0.1
    adamw = runs(method=ALLREDUCE, train={"lr": 2.0e-2})
    assert np.abs(two.losses() - adamw.losses()).max() > 1e-2
