"""Wrong requests: one sentence with file, key, found and allowed; exit 2; nothing started, nothing half-made."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

RUN = {
    "name": "r",
    "topology": "two-sites-1gbps",
    "parallel": {"replicas": 2, "stages": 2},
    "method": {"name": "dilocox", "local_steps": 4},
}


def dilocox(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "experiments.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
    )


TOPOLOGY = """
name: t
sites: {{a: {{nodes: {a}}}, b: {{nodes: {b}}}}}
wan: {{uplink: {{rate_mbps: {rate}}}, pairs: [{{between: [a, b], rtt_ms: 30}}]}}
"""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stepz=3", "train.stepz: found an unknown key"),
        ("train.steps=0", "train.steps: found 0"),
        ("train.lr=fast", "train.lr: found 'fast'"),
        ("train.lr=-1", "train.lr: found -1"),
        ("method.name=dilocoxx", "did you mean 'dilocox'"),
        ("method.compressor.name=int3", "method.compressor.name: found 'int3'"),
        ("method.local_step=3", "did you mean 'local_steps'"),
        ("parallel.replicas=3", "3 replicas of 2 ranks = 6 ranks, allowed are at most the 4 nodes"),
        ("parallel.stages=1", None),
        ("parallel={replicas: 1, stages: 2}", "allowed is one replica per site"),
        ("parallel={replicas: 4, stages: 1}", "allowed is one replica per site"),
        ("topology=no-such-wan", "no-such-wan: found no such topology"),
        ("topology=t.yaml", None),
        ("topology=same-names.yaml", "each name once"),
        ("topology=no-rate.yaml", "wan.uplink.rate_mbps: found -1"),
        ("topology=small.yaml", "parallel: found 2 ranks in a replica"),
        ("data.source=/no/such/text", "/no/such/text"),
        ("data.source=binary.txt", "binary.txt"),
        ("data.source=empty.txt", "empty.txt"),
        ("nonsense", "nonsense"),
        ("name=../../etc", "name"),
    ],
)
def test_a_wrong_run_is_refused_in_one_sentence_before_anything_starts(tmp_path: Path, override, said):
    (tmp_path / "t.yaml").write_text(TOPOLOGY.format(a=2, b=2, rate=10))
    (tmp_path / "same-names.yaml").write_text(TOPOLOGY.format(a="[x, y]", b="[y, z]", rate=10))
    (tmp_path / "no-rate.yaml").write_text(TOPOLOGY.format(a=2, b=2, rate=-1))
    (tmp_path / "small.yaml").write_text(TOPOLOGY.format(a=3, b=1, rate=10))
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    if said is None:
        from experiments.config import read_mapping, resolve_run  # noqa: PLC0415
        from experiments.overrides import apply_override  # noqa: PLC0415

        data = read_mapping(tmp_path / "run.yaml")
        apply_override(data, override)
        assert resolve_run(data, "run.yaml", near=tmp_path).world_size
        return
    done = dilocox("run", "run.yaml", "-o", "out", "--set", override, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [", "not valid YAML"),
        ("- 1", "mapping"),
        ("name: a\nname: b", "found twice"),
        (None, "cannot be read"),
    ],
)
def test_a_run_file_that_cannot_be_read_is_named(tmp_path: Path, text, said):
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
    done = dilocox("run", "run.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "run.yaml" in done.stderr
    assert done.stderr.count("\n") == 1


def test_one_wrong_run_of_a_sweep_stops_it_before_the_first_starts(tmp_path: Path):
    sweep = {
        "name": "s",
        "base": {**RUN, "topology": "loopback"},
        "list": [{}, {"train.lr": -1}],
        "seeds": [0],
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    done = dilocox("sweep", "sweep.yaml", "-o", "out", cwd=tmp_path)
    assert done.returncode == 2
    assert "train.lr" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_a_run_is_never_overwritten(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**RUN, "topology": "loopback"}))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/thesis.txt").write_text("x")
    done = dilocox("run", "run.yaml", "-o", "precious", cwd=tmp_path)
    assert done.returncode == 2
    assert (tmp_path / "precious/thesis.txt").read_text() == "x"


@pytest.mark.parametrize("arguments", [["topology", "list"], ["topology", "check", "lan-10g"], ["--help"]])
def test_commands_that_answer_end_with_0(tmp_path: Path, arguments):
    assert dilocox(*arguments, cwd=tmp_path).returncode == 0


def test_every_command_has_help_with_an_example():
    from experiments.cli import app, topology_app  # noqa: PLC0415

    commands = [*app.registered_commands, *topology_app.registered_commands]
    assert len(commands) >= 10
    for command in commands:
        assert "Example: dilocox" in (command.help or command.callback.__doc__), command.callback


def test_a_loopback_run_needs_no_root_and_says_that_its_bytes_are_counted(tmp_path: Path):
    run = {
        **RUN,
        "topology": "loopback",
        "model": {"preset": "decoder-0.4m"},
        "data": {"seq_len": 32},
        "parallel": {"replicas": 2, "stages": 1, "microbatches": 1},
        "train": {"steps": 4, "batch_size": 2, "warmup_steps": 1},
        "method": {"name": "diloco", "local_steps": 2},
        "eval": {"every": 2, "tokens": 256},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    done = dilocox("run", "run.yaml", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("config.yaml", "record.json", "steps.parquet", "rounds.parquet", "evals.parquet"):
        assert (tmp_path / "out" / name).exists(), name
    record = yaml.safe_load((tmp_path / "out/record.json").read_text())
    assert record["evidence"] == "counted"
    assert record["totals"]["wan_payload_bytes"] > 0
