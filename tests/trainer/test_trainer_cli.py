"""`python -m trainer` as a launcher sees it: exit status, last line, files; and what the kernel counted."""

import json
import os
import subprocess
import sys

import pytest
import yaml
from fleet import free_port, rank_environment
from trainings import TINY, merged, read_run

LIMIT_S = 90


def launch(size, *arguments, environment=None):
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "trainer", *map(str, arguments)],
            env={**os.environ, **rank_environment(rank, size, port), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def finish(processes):
    """(exit status, stderr) of each; nobody outlives the test."""
    try:
        return [(p.communicate(timeout=LIMIT_S)[1], p.returncode)[::-1] for p in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def write(path, config):
    path.write_text(yaml.safe_dump(config))
    return path


METHODS = {
    "allreduce": {"name": "allreduce"},
    "dilocox": {
        "name": "dilocox",
        "local_steps": 2,
        "compressor": {"name": "lowrank-int4", "rank": 48, "adaptive": False},
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_the_kernel_saw_the_payload_within_one_percent(tmp_path, method):
    config = merged(
        TINY,
        {
            "name": "ignored",
            "topology": "loopback",
            "model": {"preset": "decoder-1m", "dim": 288, "layers": 2, "heads": 6, "ffn": 768},
            "data": {"seq_len": 32},
            "train": {"steps": 12},
            "method": METHODS[method],
        },
    )
    file = write(tmp_path / "run.yaml", config)
    for status, stderr in finish(launch(4, file, "--out", tmp_path / "out")):
        assert status == 0, stderr
        assert stderr == "", "a run without warnings"
    run = read_run(config, tmp_path / "out")
    for rank, summary in enumerate(run.summaries):
        payload = sum(summary["payload_bytes"].values())
        acknowledged = sum(summary["kernel_sent"]["data"].values())
        assert payload > 1_500_000
        assert payload <= acknowledged <= 1.01 * payload, (rank, summary)
        assert 0 < sum(summary["kernel_sent"]["control"].values()) < 20_000
        assert summary["status"] == "done"
        assert summary["params_total"] == sum(s["params_stage"] for s in run.summaries[:2])
    expected = {
        f"rank-{r}.{kind}" for r in range(4) for kind in ("steps.jsonl", "rounds.jsonl", "summary.json")
    }
    assert {p.name for p in (tmp_path / "out" / "ranks").iterdir()} == expected | {"rank-1.evals.jsonl"}
    weights = {p.name for p in (tmp_path / "out" / "weights").iterdir()}
    assert weights == {"stage-0.safetensors", "stage-1.safetensors", "weights.json"}


def wrong(tmp_path, *arguments, config=None, environment=None):
    file = write(tmp_path / "run.yaml", merged(TINY, config or {}))
    ((status, stderr),) = finish(launch(1, file, *arguments, environment=environment))
    assert len(stderr.splitlines()) == 1, stderr
    assert not (tmp_path / "out").exists()
    return status, stderr


def test_a_world_of_another_size_is_refused(tmp_path):
    status, said = wrong(tmp_path, "--out", tmp_path / "out")
    assert status == 2
    assert "WORLD_SIZE: found 1, allowed parallel.replicas x parallel.stages = 2 x 2 = 4" in said


def test_a_missing_environment_is_named(tmp_path):
    status, said = wrong(tmp_path, environment={"RANK": "first"})
    assert status == 2 and "RANK: found 'first', allowed a number" in said


def test_wrong_keys_and_unreadable_data_are_refused(tmp_path):
    status, said = wrong(tmp_path, "--set", "train.stepps=3")
    assert status == 2 and "did you mean 'steps'?" in said
    alone = {"parallel": {"replicas": 1, "stages": 1}, "data": {"source": str(tmp_path / "nowhere")}}
    status, said = wrong(tmp_path, "--out", tmp_path / "out", config=alone)
    assert status == 2 and "data.source" in said


def test_the_run_folder_comes_from_the_environment_and_a_failure_is_said_in_the_last_line(tmp_path):
    """Half of the world never comes: the other half gives up within its timeout, naming itself."""
    config = merged(TINY, {"parallel": {"replicas": 2, "stages": 1}, "train": {"timeout_s": 3}})
    file = write(tmp_path / "run.yaml", config)
    (present, absent) = launch(2, file, environment={"TESTBED_RUN_DIR": str(tmp_path / "run")})
    absent.kill()
    (status, stderr), _ = finish([present, absent])
    assert status == 1
    assert stderr.splitlines()[-1].startswith("rank 0: ")
    assert (tmp_path / "run" / "ranks").is_dir()


def test_a_killed_neighbour_ends_the_run_at_once_and_loses_no_record(tmp_path):
    parallel = {"replicas": 2, "stages": 1}
    config = merged(TINY, {"parallel": parallel, "train": {"steps": 100_000, "timeout_s": 60}})
    file = write(tmp_path / "run.yaml", config)
    survivor, victim = launch(2, file, "--out", tmp_path / "out")
    for line in survivor.stdout:  # until it trains
        if line.startswith("step 3: "):
            break
    victim.kill()
    (status, stderr), _ = finish([survivor, victim])
    assert status == 1
    last = stderr.splitlines()[-1]
    lines = (tmp_path / "out" / "ranks" / "rank-0.steps.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 3
    assert last.startswith(f"rank 0, step {len(steps) + 1}: "), last


def test_a_number_that_cannot_be_sent_ends_the_run_with_rank_round_and_tensor(tmp_path):
    """An exchange that fails in its background thread is reported by the main one."""
    alone = {"replicas": 1, "stages": 1}
    train = {"inner": "sgd", "lr": 1.0e30, "warmup_steps": 0}
    file = write(
        tmp_path / "run.yaml", merged(TINY, {"parallel": alone, "train": train, "method": METHODS["dilocox"]})
    )
    ((status, stderr),) = finish(launch(1, file, "--out", tmp_path / "out"))
    last = stderr.splitlines()[-1]
    assert status == 1
    assert last.startswith("rank 0, round 1: exchange failed: ") and "weight holds" in last
    assert "Traceback" in stderr
    assert not (tmp_path / "out" / "ranks" / "rank-0.summary.json").exists()
    steps = (tmp_path / "out" / "ranks" / "rank-0.steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1, 2, 3]
