"""Turns what the ranks wrote line by line into the Parquet files of a run."""

import json
import os
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.errors import RunFailure

KINDS = ("steps", "rounds", "evals")
_SORT = {"steps": ["rank", "step"], "rounds": ["rank", "round"], "evals": ["step"]}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a JSON-lines file; a last line that a kill cut short is left out."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def last_line(path: Path, tail_bytes: int = 4096) -> dict[str, Any] | None:
    """The last complete line of a file that is still being written; None when there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - tail_bytes))
            lines = file.read().split(b"\n")[:-1]
        return dict(json.loads(lines[-1])) if lines else None
    except (OSError, ValueError):
        return None


def write_parquet(frame: pd.DataFrame, path: Path) -> None:
    """Writes in one step; what a full disk cut short is removed.

    Raises:
        RunFailure: the file could not be written; the ranks' own lines, which it is made from, stay.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        frame.to_parquet(temporary, index=False)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise RunFailure(
            f"{path}: cannot be written ({reason}); what the ranks measured is in {path.parent / 'ranks'}"
        ) from error


def collect(run_dir: Path) -> dict[str, pd.DataFrame]:
    """Writes ``steps.parquet``, ``rounds.parquet`` and ``evals.parquet`` from ``ranks/``; returns the frames."""
    frames = {}
    for kind in KINDS:
        rows = [
            row
            for path in sorted((run_dir / "ranks").glob(f"rank-*.{kind}.jsonl"))
            for row in read_lines(path)
        ]
        frame = pd.DataFrame(rows)
        if not frame.empty:
            frame = frame.sort_values(_SORT[kind], kind="stable", ignore_index=True)
            write_parquet(frame, run_dir / f"{kind}.parquet")
        frames[kind] = frame
    return frames


def summaries(run_dir: Path) -> list[dict[str, Any]]:
    """What each rank summed up at its end, in rank order."""
    found = [
        json.loads(p.read_text(encoding="utf-8")) for p in (run_dir / "ranks").glob("rank-*.summary.json")
    ]
    return sorted(found, key=lambda s: int(s["rank"]))
