"""Real ranks that are killed and started again, and what a folder then holds."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fleet import free_port, rank_environment
from trainings import TINY, Run, merged

LIMIT_S = 90


def size_of(config: dict[str, Any]) -> int:
    parallel = config["parallel"]
    return parallel["replicas"] * parallel["stages"] * parallel.get("data_parallel", 1)


@contextmanager
def ranks(config: dict[str, Any], out: Path, *arguments: str):
    """All ranks as processes; nobody outlives the block."""
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    port = free_port()
    logs = [(out.parent / f"{out.name}-{rank}.log").open("a+") for rank in range(size_of(config))]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "trainer", str(file), "--out", str(out), *arguments],
            env={**os.environ, **rank_environment(rank, size_of(config), port), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()


def said(out: Path, rank: int = 0) -> str:
    return (out.parent / f"{out.name}-{rank}.log").read_text()


def train(config: dict[str, Any], out: Path, *arguments: str, status: int = 0) -> None:
    """To the end; every rank must leave with `status`."""
    with ranks(config, out, *arguments) as processes:
        found = [process.wait(timeout=LIMIT_S) for process in processes]
    assert found == [status] * len(processes), said(out)


def train_until(config: dict[str, Any], out: Path, step: int, *arguments: str) -> None:
    """Until rank 0 has recorded `step`, then SIGKILL for everybody."""
    records = out / "ranks" / "rank-0.steps.jsonl"
    deadline = time.monotonic() + LIMIT_S
    with ranks(config, out, *arguments) as processes:
        while time.monotonic() < deadline:
            if records.is_file() and f'"step": {step},' in records.read_text():
                return
            assert processes[0].poll() is None, said(out)
            time.sleep(0.002)  # a look at the file, not a wait for something that will have happened
    raise TimeoutError(f"step {step} was not reached")


def config_of(**changes: Any) -> dict[str, Any]:
    return merged(TINY, changes)


def assert_same_run(found: Run, expected: Run) -> None:
    """The same figures bit for bit, and records without gaps or repeats; only clocks may differ."""
    clocks = {"t", "wall_s"} | {
        f"{kind}_s"
        for kind in ("compute", "bubble", "compress", "comm", "exposed_comm", "checkpoint", "other")
    }
    for kind, free in (("steps", clocks | {"payload_bytes"}), ("rounds", clocks)):  # a background exchange
        # sends its bytes in whichever step it gets to run; their sums are compared below
        for ours, theirs in zip(getattr(found, kind), getattr(expected, kind), strict=True):
            assert [{k: v for k, v in r.items() if k not in free} for r in ours] == [
                {k: v for k, v in r.items() if k not in free} for r in theirs
            ]
            times = [record["t"] for record in ours if "t" in record]
            assert times == sorted(times)
    without = {"t"}
    assert [{k: v for k, v in e.items() if k not in without} for e in found.evals] == [
        {k: v for k, v in e.items() if k not in without} for e in expected.evals
    ]
    for ours, theirs in zip(found.summaries, expected.summaries, strict=True):
        for key in ("outer_hash", "val_loss", "final_loss", "tokens", "rounds", "payload_bytes", "steps"):
            assert ours[key] == theirs[key], key
        assert sum(s["payload_bytes"] for s in found.steps[ours["rank"]]) == ours["payload_bytes"]["wan"]


def same_weights(a: Run, b: Run) -> bool:
    return a.parameters.keys() == b.parameters.keys() and all(
        np.array_equal(a.parameters[name], b.parameters[name]) for name in a.parameters
    )
