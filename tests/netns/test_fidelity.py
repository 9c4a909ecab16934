"""A machine that is too busy to be believed is told from one that is not."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from test_runs import SMALL, config

from experiments import runner

HOG = """
import sys, time
busy_s, idle_s, total_s = map(float, sys.argv[1:])
began = time.monotonic()
while time.monotonic() < began + total_s:
    end = time.monotonic() + busy_s
    while time.monotonic() < end:
        pass
    time.sleep(idle_s)
"""


@contextmanager
def overload() -> Iterator[None]:
    """Many ordinary processes that only compute, and for some seconds real-time ones that stop the delay line."""
    cores = os.cpu_count() or 1
    commands = [["chrt", "-f", "60", sys.executable, "-c", HOG, "0.2", "0.05", "3"]] * cores
    commands += [[sys.executable, "-c", HOG, "1", "0", "60"]] * (4 * cores)
    loops = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def paced_run(run_dir, step_s: float, steps: int, on_step=lambda step: None) -> dict:
    """An AllReduce run, which exchanges all the time."""

    def watch(what, facts):
        if what == "train":
            on_step(facts.get("step", 0))

    pace = {"mode": "paced", "step_s": step_s}
    paced = config(method={"name": "allreduce"}, compute=pace, train={**SMALL["train"], "steps": steps})
    return runner.run(paced, run_dir, watch)


def test_a_quiet_machine_yields_a_valid_run_and_says_how_quiet_it_was(tmp_path):
    reasons = []
    for attempt in range(3):  # a guest's core can be taken away for a while by its host: not quiet, then
        record = paced_run(tmp_path / f"run{attempt}", step_s=1.0, steps=8)
        if record["status"] == "done":
            break
        reasons.append(record["reason"])
    assert record["status"] == "done", reasons
    watched = record["fidelity"]
    assert watched["problems"] == []
    assert 0 < watched["cpu_busy_share"] <= 1
    assert 0 < watched["softirq_share"] < 0.5
    assert watched["backlog_max_bytes"] >= 0
    if record["links"]["delay"] == "nfqueue":
        assert watched["delay_line_packets"] > 100
        assert watched["lateness_p50_ms"] < watched["lateness_p99_ms"] <= watched["lateness_max_ms"]


def test_an_overloaded_machine_makes_a_run_invalid_and_every_reason_is_told(tmp_path):
    with ExitStack() as stack:

        def start(step: int) -> None:
            if step >= 2 and not started:
                started.append(stack.enter_context(overload()))

        started: list[None] = []
        record = paced_run(tmp_path / "run", step_s=0.4, steps=20, on_step=start)
    assert started
    assert record["status"] == "invalid"
    assert record["valid"] is False
    assert "steps took longer than their pace" in record["reason"]
    if record["links"]["delay"] == "nfqueue":  # with netem the kernel's own timers delay
        assert "the delay line released packets late" in record["reason"]
