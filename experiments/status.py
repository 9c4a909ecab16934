"""How far a sweep is, read from its files: for another terminal, and for after a crash."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.errors import RequestError
from experiments.runfolder import section
from experiments.series import last_line

PLAN = "plan.json"
QUIET_S = 120.0
"""A run without a record whose files nobody has touched for so long is not going on."""


@dataclass(frozen=True)
class RunStatus:
    """One run of a sweep. `state`: planned, running, interrupted, done, invalid or failed."""

    run_id: str
    state: str
    step: int = 0
    steps: int = 0
    loss: float | None = None
    left_s: float | None = None
    reason: str = ""


def write_plan(folder: Path, run_ids: list[str]) -> None:
    """The runs that a sweep means to do, in order."""
    temporary = folder / f"{PLAN}.tmp"
    temporary.write_text(json.dumps(run_ids, indent=1) + "\n", encoding="utf-8")
    temporary.replace(folder / PLAN)


def status_of(folder: Path) -> list[RunStatus]:
    """All runs of a sweep in order, or the one run whose folder it is.

    Raises:
        RequestError: no such folder, or neither a sweep nor a run in it.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder}: found no such folder, allowed is the folder of a sweep or of a run")
    if (folder / "config.yaml").is_file():
        return [_run(folder)]
    try:
        planned = [str(run) for run in json.loads((folder / PLAN).read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        planned = []
    present = sorted(path.parent.name for path in folder.glob("*/config.yaml"))
    names = list(dict.fromkeys([*planned, *present]))
    if not names:
        raise RequestError(f"{folder}: found neither a sweep's {PLAN} nor a run in it")
    return [_run(folder / name) for name in names]


def _run(folder: Path) -> RunStatus:
    name = folder.resolve().name
    config = _mapping(folder / "config.yaml")
    steps = int((config.get("train") or {}).get("steps") or 0)
    try:
        record = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        totals = section(record, "totals")
        return RunStatus(
            name,
            str(record.get("status", "failed")),
            int(totals.get("steps") or 0),
            steps,
            totals.get("val_loss"),
            None,
            str(record.get("reason") or ""),
        )
    except (OSError, ValueError):
        pass
    if not config:
        return RunStatus(name, "planned")
    files = sorted((folder / "ranks").glob("rank-*.steps.jsonl"))
    lines = [line for file in files if (line := last_line(file))]
    step = min((int(line["step"]) for line in lines), default=0)
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    newest = max((path.stat().st_mtime for path in [folder / "config.yaml", *files]), default=0.0)
    if time.time() - newest > QUIET_S:
        return RunStatus(name, "interrupted", step, steps, losses[-1] if losses else None)
    trained_s = max((float(line["t"]) for line in lines), default=0.0)
    left_s = trained_s / step * (steps - step) if step else None
    return RunStatus(name, "running", step, steps, losses[-1] if losses else None, left_s)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
