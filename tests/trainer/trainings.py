"""Small training runs, made once and shared by the tests that look at them."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fleet import Fleet

from trainer.weights import read_weights

TINY: dict[str, Any] = {
    "model": {"preset": "decoder-0.4m", "dim": 32, "layers": 3, "heads": 2, "ffn": 64},
    "data": {"seq_len": 16},
    "parallel": {"replicas": 2, "stages": 2, "microbatches": 2},
    "train": {"steps": 7, "batch_size": 4, "lr": 5.0e-3, "warmup_steps": 2, "timeout_s": 30},
    "eval": {"every": 3, "tokens": 512},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with sections of `changes` merged in; a method is replaced whole."""
    result = copy.deepcopy(base)
    for key, value in changes.items():
        if key != "method" and isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = result[key] | value
        else:
            result[key] = value
    return result


def ranks_of(config: dict[str, Any]) -> int:
    parallel = config["parallel"]
    return parallel["replicas"] * parallel.get("data_parallel", 1) * parallel["stages"]


@dataclass
class Run:
    """What a run left behind, by rank; `parameters` are the final outer ones by canonical name."""

    config: dict[str, Any]
    summaries: list[dict[str, Any]]
    steps: list[list[dict[str, Any]]]
    rounds: list[list[dict[str, Any]]]
    evals: list[dict[str, Any]]
    parameters: dict[str, np.ndarray]
    folder: Path

    @property
    def stages(self) -> int:
        return self.config["parallel"]["stages"]

    @property
    def replicas(self) -> int:
        return self.config["parallel"]["replicas"]

    def losses(self) -> np.ndarray:
        """[replicas x data_parallel, steps]: training losses of everybody who has a last stage."""
        last = self.steps[self.stages - 1 :: self.stages]
        return np.array([[record["loss"] for record in records] for records in last])

    def global_losses(self) -> np.ndarray:
        """[steps]: mean over replicas."""
        return self.losses().mean(axis=0)

    def validation(self) -> np.ndarray:
        return np.array([record["val_loss"] for record in self.evals])


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_run(config: dict[str, Any], out: Path) -> Run:
    """Read a finished run's files."""
    ranks = out / "ranks"
    size = ranks_of(config)
    return Run(
        config,
        [json.loads((ranks / f"rank-{r}.summary.json").read_text()) for r in range(size)],
        [read_lines(ranks / f"rank-{r}.steps.jsonl") for r in range(size)],
        [read_lines(ranks / f"rank-{r}.rounds.jsonl") for r in range(size)],
        read_lines(ranks / f"rank-{config['parallel']['stages'] - 1}.evals.jsonl"),
        {name: tensor.numpy() for name, tensor in read_weights(out).items()},
        out,
    )


class Runs:
    """`runs(method={...}, train={...})` merges into TINY, trains, and remembers."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet, self.folder = fleet, folder
        self.done: dict[str, Run] = {}

    def __call__(self, *, again: bool = False, **changes: Any) -> Run:
        config = merged(TINY, changes)
        key = json.dumps(config, sort_keys=True)
        if again or key not in self.done:
            out = self.folder / f"run-{len(list(self.folder.iterdir()))}"
            size = ranks_of(config)
            self.fleet.run(size, "train", config=config, out=str(out))
            run = read_run(config, out)
            if again:
                return run
            self.done[key] = run
        return self.done[key]
