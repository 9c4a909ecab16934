"""A machine that is too busy to be believed is told from one that is not."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from test_runs import SMALL, config

from experiments import runner

LOOPS_S = 4.0
PACE = {"mode": "paced", "step_s": 0.4}
SPIN = "import sys, time\nend = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"


@contextmanager
def busy(priority: list[str], count: int, seconds: float) -> Iterator[None]:
    """So many processes that do nothing but compute, for so long at most."""
    loops = [subprocess.Popen([*priority, sys.executable, "-c", SPIN, str(seconds)]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_beside(run_dir, priority: list[str], count: int, seconds: float) -> dict:
    """An AllReduce run that exchanges all the time; the load starts at its third step."""
    started = []

    def watch(what, facts):
        if what == "train" and facts.get("step", 0) >= 3 and not started:
            started.append(busy(priority, count, seconds))
            started[0].__enter__()

    try:
        paced = config(method={"name": "allreduce"}, compute=PACE, train={**SMALL["train"], "steps": 16})
        record = runner.run(paced, run_dir, watch)
    finally:
        for load in started:
            load.__exit__(None, None, None)
    assert started or not count
    return record


def test_a_quiet_machine_yields_a_valid_run_and_says_how_quiet_it_was(tmp_path):
    record = run_beside(tmp_path / "run", [], 0, 0.0)
    assert record["status"] == "done", record["reason"]
    watched = record["fidelity"]
    assert watched["problems"] == []
    assert 0 < watched["cpu_busy_share"] <= 1
    assert 0 < watched["softirq_share"] < 0.5
    assert watched["backlog_max_bytes"] >= 0
    if record["links"]["delay"] == "nfqueue":
        assert watched["delay_line_packets"] > 100
        assert watched["lateness_p50_ms"] < watched["lateness_p99_ms"] <= watched["lateness_max_ms"]


def test_processes_that_take_the_processors_from_the_trainers_make_a_run_invalid(tmp_path):
    record = run_beside(tmp_path / "run", [], 12 * (os.cpu_count() or 1), 60.0)
    assert record["status"] == "invalid"
    assert record["valid"] is False
    assert "steps took longer than their pace" in record["reason"]


def test_processes_that_take_the_processors_from_the_delay_line_make_a_run_invalid(tmp_path):
    record = run_beside(tmp_path / "run", ["chrt", "-f", "60"], os.cpu_count() or 1, LOOPS_S)
    if record["links"]["delay"] != "nfqueue":
        pytest.skip("netem delays here: the kernel's own timers do it")
    assert record["status"] == "invalid"
    assert "the delay line released packets late" in record["reason"]
