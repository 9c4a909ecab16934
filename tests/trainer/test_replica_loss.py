"""A run goes on without a lost replica, and with it once it is back; real processes, killed for real."""

import json
import os
import subprocess
import sys
import time

import pytest
import yaml
from fleet import free_port, rank_environment
from trainings import TINY, merged, read_lines

LIMIT_S = 90
LOWRANK = {"name": "lowrank-int4", "rank": 4, "adaptive": True, "max_rank": 6, "block": 32}
METHODS = {
    "dilocox": {
        "name": "dilocox",
        "overlap": {"delay_rounds": 1, "progress": "keep"},
        "local_steps": 4,
        "compressor": LOWRANK,
    },
    "diloco": {"name": "diloco", "local_steps": 4},
}

LATER = [("dilocox", 2), ("diloco", 0), ("diloco", 2)]


class Site:
    """A coordinator and ranks on loopback; nobody outlives the block."""

    def __init__(self, folder, method, steps=60, **parallel):
        self.out = folder / "run"
        parallel = {"replicas": 3, "stages": 1, "on_replica_loss": "continue", **parallel}
        train = {"steps": steps, "timeout_s": 40}
        paced = {"mode": "paced", "step_s": 0.05}
        changes = {
            "parallel": parallel,
            "train": train,
            "method": method,
            "eval": {"every": 20},
            "compute": paced,
        }
        self.config = merged(TINY, changes)
        self.size = self.config["parallel"]["replicas"] * self.config["parallel"]["stages"]
        self.file = folder / "run.yaml"
        self.file.write_text(yaml.safe_dump(self.config))
        self.port = free_port()
        self.logs = folder
        self.processes = {}

    def __enter__(self):
        self.coordinator = self._start("coordinator", 0, "-m", "trainer.coordinator", str(self.file))
        for rank in range(self.size):
            self.start(rank)
        return self

    def __exit__(self, *_):
        for process in [*self.processes.values(), self.coordinator]:
            process.kill()
            process.wait()

    def _start(self, name, rank, *arguments):
        environment = {**os.environ, **rank_environment(rank, self.size, self.port), "OMP_NUM_THREADS": "1"}
        with (self.logs / f"{name}.log").open("a") as log:
            return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=log, stderr=log)

    def start(self, rank):
        self.processes[rank] = self._start(
            f"rank-{rank}", rank, "-m", "trainer", str(self.file), "--out", str(self.out)
        )

    def said(self):
        return "".join(f"--- {p.name}\n{p.read_text()}" for p in sorted(self.logs.glob("*.log")))

    def records(self, rank, kind="steps"):
        path = self.out / "ranks" / f"rank-{rank}.{kind}.jsonl"
        return read_lines(path) if path.is_file() else []

    def wait_for(self, rank, step):
        deadline = time.monotonic() + LIMIT_S
        while not any(record["step"] >= step for record in self.records(rank)):
            assert self.processes[rank].poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)  # a look at the file

    def kill(self, rank):
        self.processes[rank].kill()
        self.processes[rank].wait()

    def finish(self, ranks):
        for rank in ranks:
            assert self.processes[rank].wait(timeout=LIMIT_S) == 0, self.said()
        assert self.coordinator.wait(timeout=LIMIT_S) == 0, self.said()
        return [json.loads((self.out / "ranks" / f"rank-{r}.summary.json").read_text()) for r in ranks]

    def hashes(self, rank):
        return {record["round"]: record["outer_hash"] for record in self.records(rank, "rounds")}


def assert_same_outer_parameters(site, summaries, stages=1):
    for stage in range(stages):
        peers = [summary for summary in summaries if summary["stage"] == stage]
        assert len({summary["outer_hash"] for summary in peers}) == 1
        histories = [site.hashes(summary["rank"]) for summary in peers]
        for history in histories:
            assert all(histories[0].get(number, own) == own for number, own in history.items())


@pytest.mark.parametrize(
    ("method", "victim"),
    [("dilocox", 0), *(pytest.param(*case, marks=pytest.mark.long) for case in LATER)],
)
def test_the_others_go_on_and_end_with_the_same_parameters(tmp_path, method, victim):
    with Site(tmp_path, METHODS[method], steps=30) as site:
        site.wait_for(1, 9)
        site.kill(victim)
        left = [rank for rank in range(3) if rank != victim]
        summaries = site.finish(left)
    assert_same_outer_parameters(site, summaries)
    for summary in summaries:
        assert summary["members"] == left and summary["steps"] == 30
        steps = [record["step"] for record in site.records(summary["rank"])]
        assert steps == list(range(1, 31)), "nothing is trained twice"
    batch = 4 * 16
    assert 30 * 2 * batch < summaries[0]["tokens"] < 30 * 3 * batch
    evaluations = [e["step"] for rank in left for e in site.records(rank, "evals")]
    assert 30 in evaluations, "whoever is first now validates"
    assert f"replica {victim} is lost" in site.said()
    assert (site.out / "weights" / "weights.json").is_file()


@pytest.mark.parametrize("method", ["dilocox", pytest.param("diloco", marks=pytest.mark.long)])
def test_a_replica_that_comes_back_holds_the_same_parameters_afterwards(tmp_path, method):
    with Site(tmp_path, METHODS[method], steps=1_000_000) as site:
        site.wait_for(1, 9)
        site.kill(2)
        site.start(2)
        last = site.records(2)[-1]["step"]
        site.wait_for(2, last + 1)
        back = next(record for record in site.records(2) if record["step"] > last)
        site.wait_for(2, back["step"] + 24)
    assert f"replica 2 is back after step {back['step'] - 1}" in site.said()
    steps = [record["step"] for record in site.records(2)]
    assert steps == [*range(1, last + 1), *range(back["step"], steps[-1] + 1)]
    assert back["step"] > last + 1, "it was away for a while"
    rounds = [record for record in site.records(2, "rounds") if record["step"] >= back["step"]]
    assert len(rounds) >= 3
    for record in rounds[:-1]:  # the last may have been cut off at the others
        assert all(site.hashes(peer)[record["round"]] == record["outer_hash"] for peer in (0, 1))
    if method == "dilocox":
        assert rounds[0]["delta_norm"] == 0.0 < rounds[1]["delta_norm"], "nothing for what it did not train"
    tokens = {r: next(x["tokens"] for x in site.records(r) if x["step"] == back["step"]) for r in (0, 2)}
    assert tokens[0] == tokens[2] < back["step"] * 3 * 4 * 16


@pytest.mark.long
def test_with_stages_the_whole_replica_goes(tmp_path):
    with Site(tmp_path, METHODS["dilocox"], steps=30, replicas=2, stages=2) as site:
        site.wait_for(0, 9)
        site.kill(3)
        summaries = site.finish([0, 1])
        assert site.processes[2].wait(timeout=LIMIT_S) == 1
    assert [summary["members"] for summary in summaries] == [[0], [0]]
