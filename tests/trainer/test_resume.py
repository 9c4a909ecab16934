"""Law 7: killed at any moment and resumed, a run is the run that was never killed, bit for bit."""

import random
import shutil

import pytest
from killing import assert_same_run, config_of, said, same_weights, size_of, train, train_until
from trainings import read_run

from trainer.checkpoint import saved_steps
from trainer.tensor_file import TensorFileError
from trainer.weights import read_weights

LOWRANK = {"name": "lowrank-int4", "rank": 4, "adaptive": True, "max_rank": 6, "block": 32}
METHODS = {
    "allreduce": {"name": "allreduce"},
    "diloco int4": {"name": "diloco", "local_steps": 3, "compressor": {"name": "int4", "block": 32}},
    "dilocox keep": {"name": "dilocox", "local_steps": 2, "compressor": LOWRANK},
    "dilocox discard": {
        "name": "dilocox",
        "local_steps": 2,
        "overlap": {"delay_rounds": 1, "progress": "discard"},
        "compressor": {**LOWRANK, "adaptive": False},
    },
}
FURTHER = {
    "local_sgd": {"name": "local_sgd", "local_steps": 3},
    "opendiloco": {"name": "opendiloco", "local_steps": 3},
    "eager_diloco": {"name": "eager_diloco", "local_steps": 2, "compressor": {"name": "int4", "block": 32}},
    "noloco": {"name": "noloco", "local_steps": 2},
}
STEPS = 24


def config(method, **changes):
    train = {"steps": STEPS, "grad_clip": 1.0}
    return config_of(
        method=(METHODS | FURTHER)[method],
        train=train,
        checkpoint={"every_steps": 5, "keep": 2},
        parallel={"stages": 1},
        **changes,
    )


@pytest.fixture
def never_killed(runs):
    """The same run without a stop and without a checkpoint."""
    return lambda plain: runs(**{**plain, "checkpoint": {}})


@pytest.fixture
def resume(fleet):
    """Continue in processes that were started earlier: importing torch takes longer than these runs."""
    return lambda plain, out: fleet.run(size_of(plain), "train", config=plain, out=str(out), resume=True)


ALL = [*METHODS, *(pytest.param(name, marks=pytest.mark.long) for name in FURTHER)]


@pytest.mark.parametrize("method", ALL)
def test_killed_and_resumed_is_never_killed(tmp_path, never_killed, resume, method):
    plain, out = config(method), tmp_path / "run"
    moment = random.Random(f"{method}").randint(7, STEPS - 3)
    train_until(plain, out, moment)
    resume(plain, out)
    found = read_run(plain, out)
    assert_same_run(found, never_killed(plain))
    assert same_weights(found, never_killed(plain))
    carried = found.summaries[0]["carried_payload_bytes"]["wan"]
    assert 0 < carried < found.summaries[0]["payload_bytes"]["wan"]
    kept = [saved_steps(out / "checkpoints", rank) for rank in (0, 1)]
    assert kept[0] == kept[1] and len(kept[0]) == 2


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again_with_stages(tmp_path, never_killed, resume, method, seed):
    plain = {**config(method), "parallel": config_of()["parallel"]}
    out, rng = tmp_path / "run", random.Random(seed)
    for moment in sorted(rng.sample(range(1, STEPS), 3)):
        train_until(plain, out, moment, "--resume")
    resume(plain, out)
    assert_same_run(read_run(plain, out), never_killed(plain))


def newest(out):
    return saved_steps(out / "checkpoints", 0)[0]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path, never_killed):
    plain, out = config("dilocox keep"), tmp_path / "run"
    train_until(plain, out, 19)
    step = newest(out)
    folder = out / "checkpoints" / f"step-{step:08d}" / "rank-1"
    tensors = bytearray((folder / "state.safetensors").read_bytes())
    tensors[-1] ^= 1
    (folder / "state.safetensors").write_bytes(tensors)
    (folder.with_name("rank-0.part")).mkdir()
    train(plain, out, "--resume")
    sentence = f"{folder / 'state.safetensors'}: its sha256 is not the one in manifest.json"
    assert sentence in said(out, 1) and sentence not in said(out, 0)
    assert "resumed after step " in said(out) and f"resumed after step {step}\n" not in said(out)
    assert_same_run(read_run(plain, out), never_killed(plain))


def test_another_layout_takes_the_weights_and_says_what_it_drops(tmp_path):
    plain, out = config("diloco int4"), tmp_path / "run"
    train_until(plain, out, 17)
    other = {**plain, "parallel": {"replicas": 1, "stages": 3, "microbatches": 4}}
    train(other, out, "--resume")
    assert "with 1 x 3 ranks instead of 2 x 1: kept are the weights" in said(out)
    run = read_run(other, out)
    first = run.steps[0][0]
    assert first["step"] > 10 and len(run.steps[0]) == STEPS - first["step"] + 1
    # two replicas saw twice as many tokens in each step
    batch = 4 * 16
    assert first["tokens"] == 2 * batch * (first["step"] - 1) + batch
    assert run.losses()[0, 0] < 5.0, "it goes on from trained weights: 5.5 is a fresh model's loss"
    assert (out / "ranks" / f"until-step-{first['step'] - 1}" / "rank-1.steps.jsonl").is_file()


def test_another_configuration_or_a_run_that_forgot_to_resume_is_refused(tmp_path):
    plain, out = config("allreduce"), tmp_path / "run"
    train_until(plain, out, 12)
    train({**plain, "seed": 3}, out, "--resume", status=2)
    assert "seed: found 3, allowed 0 as in " in said(out)
    before = newest(out)
    train(plain, out, status=2)
    assert "allowed with --resume" in said(out) and newest(out) == before


def test_before_the_first_checkpoint_is_whole_resume_starts_anew(tmp_path, never_killed, resume):
    plain, out = config("allreduce"), tmp_path / "run"
    train_until(plain, out, 3)
    unfinished = out / "checkpoints" / "step-00000005"
    (unfinished / "rank-0.part").mkdir(parents=True)
    resume(plain, out)
    assert not (unfinished / "rank-0.part").exists()
    assert_same_run(read_run(plain, out), never_killed(plain))


def test_weights_of_a_run_are_where_any_layout_can_start(runs):
    trained = runs(method=METHODS["diloco int4"])
    losses = []
    for replicas, stages in ((1, 1), (1, 3), (2, 1)):
        run = runs(
            model={"init_from": str(trained.folder)},
            parallel={"replicas": replicas, "stages": stages, "microbatches": 4},
            train={"steps": 1},
            method={"name": "allreduce"},
        )
        losses.append(run.evals[0]["val_loss"])
    assert losses[2] == pytest.approx(trained.evals[-1]["val_loss"], rel=1e-6)
    assert losses[0] == losses[2] and losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[0] < 5.3, "a fresh model has 5.55"


def test_weights_of_another_shape_are_refused(tmp_path, runs):
    small = config_of(parallel={"replicas": 1, "stages": 1}, train={"steps": 1}, method={"name": "allreduce"})
    source = runs(**small).folder
    other = {**small, "model": small["model"] | {"init_from": str(source), "ffn": 96}}
    train(other, tmp_path / "other", status=2)
    assert "mlp.gate_proj.weight: found [64, 32], allowed [96, 32]" in said(tmp_path / "other")


def test_weights_that_are_not_there_or_damaged_are_named(tmp_path, runs):
    with pytest.raises(TensorFileError, match="found no weights"):
        read_weights(tmp_path)
    trained = runs(method=METHODS["diloco int4"])
    shutil.copytree(trained.folder / "weights", tmp_path / "weights")
    file = tmp_path / "weights" / "stage-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(TensorFileError, match=r"stage-1\.safetensors: its sha256"):
        read_weights(tmp_path)
