"""Whole runs over real emulated links: what is recorded, what is refused, and how they end."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import host
import pandas as pd
import pytest
import yaml

from experiments import runner
from experiments.config import resolve_run
from testbed.network import Network

SMALL = {
    "name": "small",
    "topology": "topologies/two-sites-1gbps.yaml",
    "model": {"preset": "decoder-0.4m"},
    "data": {"source": "pydoc-topics", "seq_len": 64},
    "parallel": {"replicas": 2, "stages": 2, "microbatches": 2},
    "train": {"steps": 12, "batch_size": 4, "lr": 1e-3, "warmup_steps": 2},
    "method": {"name": "dilocox", "local_steps": 3},
    "eval": {"every": 6, "tokens": 1024},
}


def config(**changes):
    return resolve_run({**SMALL, **changes}, "small.yaml")


def long_run(steps: int = 100_000):
    return config(train={**SMALL["train"], "steps": steps}, eval={"every": 10**6, "tokens": 1024})


def write_run(path: Path, **changes) -> Path:
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return path


def training(run_dir: Path) -> bool:
    """Whether every rank has taken a step."""
    files = list((run_dir / "ranks").glob("rank-*.steps.jsonl"))
    return len(files) == 4 and all(f.stat().st_size for f in files)


def workers(run_dir: Path) -> list[int]:
    """Process ids of the trainers of runs below a folder (nobody else's), in the order of their start."""
    mark = f"TESTBED_RUN_DIR={run_dir.resolve()}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                ours = mark in (entry / "environ").read_bytes()
            except OSError:
                continue
            if ours and arguments[1:3] == [b"-m", b"trainer"]:
                found.append(int(entry.name))
    return sorted(found)


def node_of(pid: int) -> str:
    for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if item.startswith(b"TESTBED_NODE="):
            return item.partition(b"=")[2].decode()
    return ""


def test_emulated_and_loopback_runs_have_the_same_losses_bit_for_bit_and_a_complete_record(tmp_path):
    method = {"name": "allreduce"}
    emulated = runner.run(config(method=method), tmp_path / "emulated")
    loopback = runner.run(config(method=method, topology="loopback"), tmp_path / "loopback")
    assert emulated["status"] == loopback["status"] == "done", (emulated["reason"], loopback["reason"])
    steps = [pd.read_parquet(tmp_path / name / "steps.parquet") for name in ("emulated", "loopback")]
    assert list(steps[0].loss.dropna()) == list(steps[1].loss.dropna())
    assert len(steps[0].loss.dropna()) == 24
    assert emulated["totals"]["val_loss"] == loopback["totals"]["val_loss"]
    assert (emulated["evidence"], loopback["evidence"]) == ("trained", "counted")

    counts, totals = emulated["accounting"], emulated["totals"]
    assert counts["wan_payload_bytes"] == steps[0].payload_bytes.sum()
    assert counts["kernel_wan_bytes"] == pytest.approx(counts["wan_payload_bytes"], rel=0.01)
    assert 1.04 <= counts["wan_wire_bytes"] / counts["wan_payload_bytes"] <= 1.09
    assert counts["control_wire_bytes"] > 0
    assert totals["wan_bytes_per_token"] == counts["wan_wire_bytes"] / totals["tokens"]
    assert loopback["totals"]["wan_wire_bytes"] is None  # nothing was on a wire

    record = json.loads((tmp_path / "emulated/record.json").read_text())
    assert record["valid"] is True
    assert {m["when"] for m in record["links"]["measured"]} == {"before", "after"}
    last = {(m["when"], m["source"]): m for m in record["links"]["measured"]}
    assert all(m["ok"] for m in last.values())
    assert record["fidelity"]["problems"] == []
    for key in ("versions", "commit", "kernel", "machine", "data", "schema_version", "topology"):
        assert record[key], key
    links = pd.read_parquet(tmp_path / "emulated/links.parquet")
    assert {"t", "link", "tx_bytes", "tx_packets", "dropped", "backlog"} <= set(links)
    assert (links.groupby("link").tx_bytes.diff().dropna() >= 0).all()
    again = resolve_run(yaml.safe_load((tmp_path / "emulated/config.yaml").read_text()), "config.yaml")
    assert again == config(method=method)


def test_data_parallel_ranks_share_their_sites_lan_and_the_bytes_agree(tmp_path):
    changes = {"parallel": {"replicas": 2, "stages": 1, "data_parallel": 2, "microbatches": 2}}
    record = runner.run(config(**changes), tmp_path / "run")
    assert record["status"] == "done", record["reason"]
    summary = json.loads((tmp_path / "run/ranks/rank-0.summary.json").read_text())
    assert summary["wan_congestion_control"] == ["cubic"], "as the topology asks, not as the host prefers"
    counts = record["accounting"]
    assert counts["kernel_lan_bytes"] == pytest.approx(
        counts["lan_payload_bytes"] + counts["evaluation_bytes"], rel=0.02
    )
    steps = pd.read_parquet(tmp_path / "run/steps.parquet").groupby("rank").payload_bytes.sum()
    assert steps[1] == steps[3] == 0 < steps[0] == steps[2], (
        "only the first rank of a site talks across the WAN"
    )


def test_files_of_a_run_belong_to_the_user_behind_sudo(tmp_path):
    run_file = write_run(tmp_path / "run.yaml", train={**SMALL["train"], "steps": 2})
    tmp_path.chmod(0o755)
    run_dir = tmp_path / "runs" / "mine"
    done = subprocess.run(
        [*host.DILOCOX, "run", str(run_file), "-o", str(run_dir)],
        env={**os.environ, "SUDO_UID": "12345", "SUDO_GID": "12345"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.stat().st_uid for path in [run_dir, *run_dir.rglob("*")]} == {12345}


def test_a_link_that_does_not_meet_its_figures_yields_no_valid_result(tmp_path, monkeypatch):
    original = Network._shape

    def slower(self):
        original(self)
        self.nodes["north-router"].run(
            ["tc", "class", "change", "dev", "up", "parent", "1:1", "classid", "1:10", "htb"]
            + "rate 900mbit ceil 900mbit burst 125000 cburst 125000 quantum 60000".split()
        )

    monkeypatch.setattr(Network, "_shape", slower)
    record = runner.run(config(), tmp_path / "run")
    assert record["status"] == "invalid"
    assert record["valid"] is False
    assert "before the run: north-south" in record["reason"]
    assert not list((tmp_path / "run/ranks").iterdir())  # nothing was trained on it


def test_a_delay_line_that_dies_during_a_run_makes_it_invalid(tmp_path):
    killed = []

    def kill_delay_line(what, facts):
        if what == "train" and facts.get("step", 0) >= 3 and not killed:
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and b"testbed.shaping.delayline" in _arguments(entry):
                    os.kill(int(entry.name), signal.SIGKILL)
                    killed.append(entry.name)

    topology = tmp_path / "two-sites.yaml"
    shipped = Path(SMALL["topology"]).read_text(encoding="utf-8")
    topology.write_text(f"{shipped}delay: nfqueue\n", encoding="utf-8")
    long = config(
        topology=str(topology),
        train={**SMALL["train"], "steps": 100_000},
        eval={"every": 10**6, "tokens": 1024},
    )
    record = runner.run(long, tmp_path / "run", kill_delay_line)
    assert killed
    assert record["status"] == "invalid"
    assert "delay line died" in record["reason"]
    assert not pd.read_parquet(tmp_path / "run/steps.parquet").empty  # what was measured is kept


def _arguments(entry: Path) -> list[bytes]:
    try:
        return (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def test_a_killed_worker_fails_its_run_by_name_and_the_sweep_goes_on(tmp_path):
    sweep = tmp_path / "sweep.yaml"
    small = {**SMALL, "train": {**SMALL["train"], "steps": 4}}
    big = {"train.steps": 100_000, "eval.every": 10**6}
    sweep.write_text(yaml.safe_dump({"name": "s", "base": small, "list": [big, {}], "seeds": [0]}))
    process = host.start("sweep", str(sweep), "-o", str(tmp_path / "out"))
    try:
        host.wait_for(lambda: any(training(d) for d in (tmp_path / "out").glob("*")), 60, "first step")
        victim = workers(tmp_path / "out")[-1]
        node = node_of(victim)
        os.kill(victim, signal.SIGKILL)
        out, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 1
    records = [json.loads(p.read_text()) for p in (tmp_path / "out").glob("*/record.json")]
    by_status = {record["status"]: record for record in records}
    assert set(by_status) == {"failed", "done"}, out
    assert f"node {node}: killed by signal 9" in by_status["failed"]["reason"]
    assert f"{node}.log" in by_status["failed"]["reason"]
    assert by_status["failed"]["totals"]["steps"] > 0
    kept = host.dilocox("sweep", str(sweep), "-o", str(tmp_path / "out"), "--resume")
    assert kept.returncode == 1
    assert "failed earlier" in kept.stdout
    assert "done earlier" in kept.stdout
    assert "1 of 2 runs are not valid; to redo them: --resume --retry" in kept.stdout


def test_a_worker_without_progress_fails_its_run_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "STALL_S", 4.0)
    stopped = []

    def freeze_one(what, facts):
        if what == "train" and facts.get("step", 0) >= 3 and not stopped:
            pid = workers(tmp_path)[-1]
            stopped.append(node_of(pid))
            os.kill(pid, signal.SIGSTOP)

    began = time.monotonic()
    record = runner.run(long_run(), tmp_path / "run", freeze_one)
    assert record["status"] == "failed"
    assert f"node {stopped[0]}: made neither CPU nor byte progress" in record["reason"]
    assert time.monotonic() - began < 90


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_down_within_five_seconds_and_a_resumed_sweep_goes_on(tmp_path, number):
    sweep = tmp_path / "sweep.yaml"
    base = {**SMALL, "train": {**SMALL["train"], "steps": 4}}
    slow = {"compute": {"mode": "paced", "step_s": 4.0}}
    sweep.write_text(yaml.safe_dump({"name": "s", "base": base, "list": [{}, slow], "seeds": [0]}))
    before = host.snapshot()
    process = host.start("sweep", str(sweep), "-o", str(tmp_path / "out"))
    finished = lambda: list((tmp_path / "out").glob("*/record.json"))  # noqa: E731
    host.wait_for(finished, 90, "the first run's end")
    first = finished()[0]
    record = json.loads(first.read_text())
    assert record["status"] == "done", record["reason"]
    written = first.stat().st_mtime_ns
    host.wait_for(
        lambda: sum(training(d) for d in (tmp_path / "out").glob("*")) == 2, 60, "the second run's step"
    )
    seconds = host.stop(process, number)
    assert seconds < 5
    assert process.returncode == 130
    assert host.snapshot() == before
    second = next(d for d in (tmp_path / "out").glob("*") if d.is_dir() and d != first.parent)
    assert json.loads((second / "record.json").read_text())["status"] == "interrupted"
    assert not pd.read_parquet(second / "steps.parquet").empty

    refused = host.dilocox("sweep", str(sweep), "-o", str(tmp_path / "out"))
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    if number == signal.SIGINT:
        resumed = host.dilocox("sweep", str(sweep), "-o", str(tmp_path / "out"), "--resume")
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert first.stat().st_mtime_ns == written  # not done again
        assert json.loads((second / "record.json").read_text())["status"] == "done"


def foreign_things():
    """A namespace, a veth, an iptables rule and a cgroup that are not ours; returns how to remove them."""
    make = [
        ["ip", "netns", "add", "not-ours"],
        ["ip", "link", "add", "name", "not-ours0", "type", "veth", "peer", "name", "not-ours1"],
        ["iptables", "-w", "5", "-t", "mangle", "-A", "FORWARD", "-i", "not-ours0", "-j", "ACCEPT"],
    ]
    unmake = [
        ["iptables", "-w", "5", "-t", "mangle", "-D", "FORWARD", "-i", "not-ours0", "-j", "ACCEPT"],
        ["ip", "link", "del", "not-ours0"],
        ["ip", "netns", "del", "not-ours"],
    ]
    for command in make:
        subprocess.run(command, check=True, timeout=10)
    group = next(p for p in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")) if p.is_dir()) / "not-ours"
    group.mkdir()
    return [*unmake, ["rmdir", str(group)]]


@pytest.fixture
def foreign():
    unmake = foreign_things()
    stranger = subprocess.Popen(["unshare", "-n", "sleep", "600"])
    yield stranger
    stranger.kill()
    stranger.wait()
    for command in unmake:
        subprocess.run(command, check=True, timeout=10)


@pytest.mark.parametrize("moment", [0.8, 1.2, 1.6, 3.0, 8.0, 11.0])
def test_ctrl_c_at_any_moment_leaves_nothing_within_five_seconds(tmp_path, moment):
    run_file = write_run(tmp_path / "run.yaml", train={**SMALL["train"], "steps": 100_000})
    before = host.snapshot()
    process = host.start("run", str(run_file), "-o", str(tmp_path / "run"))
    time.sleep(moment)
    assert host.stop(process) < 5
    assert process.returncode != 0
    assert host.snapshot() == before
    process.stdout.close()


def kill_while(kind: str, moment: float, tmp_path: Path, run_file: Path) -> None:
    """Kills one command with SIGKILL: a run so many seconds after its start, likewise the building of a network, or
    the taking down of one so many seconds after it was told to go."""
    run_dir = tmp_path / f"run-{moment}"
    command = ["run", str(run_file), "-o", str(run_dir)] if kind == "run" else ["up", "two-sites-1gbps"]
    process = host.start(*command)
    if kind == "down":
        assert "is up" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
    time.sleep(moment)
    process.kill()
    process.wait()
    process.stdout.close()


def clean_and_compare(before: dict[str, str], what: str) -> None:
    cleaned = host.dilocox("clean")
    assert cleaned.returncode == 0, cleaned.stderr
    assert host.snapshot() == before, what


# seconds: while importing, building, probing, starting, training; then while taking down
MOMENTS = [("run", moment) for moment in (0.5, 1.0, 1.4, 1.8, 2.5, 4.5, 9.0, 14.0)]
MOMENTS += [("down", moment) for moment in (0.02, 0.1)]


def test_after_sigkill_at_any_moment_clean_restores_the_host_and_touches_nothing_else(tmp_path, foreign):
    run_file = write_run(tmp_path / "run.yaml", train={**SMALL["train"], "steps": 100_000})
    for kind, moment in MOMENTS:
        before = host.snapshot()
        other = host.start("up", "lan-10g") if (kind, moment) == MOMENTS[3] else None
        kill_while(kind, moment, tmp_path, run_file)
        if other is not None:
            assert host.dilocox("clean").returncode == 0
            assert other.poll() is None, "clean touched a living session"
            host.stop(other)
            other.stdout.close()
        clean_and_compare(before, f"{kind} killed after {moment} s")
        assert foreign.poll() is None
    assert "nothing to remove" in host.dilocox("clean").stdout


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_fifty_kills_at_random_moments_of_up_run_and_down_leave_the_host_as_it_was(tmp_path, foreign):
    run_file = write_run(tmp_path / "run.yaml", train={**SMALL["train"], "steps": 100_000})
    latest = {"up": 1.6, "run": 15.0, "down": 0.25}
    moments = random.Random(0)
    for number in range(50):
        kind = ("up", "run", "down")[number % 3]
        before = host.snapshot()
        moment = round(moments.uniform(0, latest[kind]), 3)
        kill_while(kind, moment, tmp_path, run_file)
        clean_and_compare(before, f"number {number}: {kind} killed after {moment} s")
        assert foreign.poll() is None
