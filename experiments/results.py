"""What the runs of a sweep found, as frames: one summary row per run, and the series behind it."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from rich.table import Table

from experiments import overrides, tables
from experiments.bytecurve import with_wan_bytes
from experiments.columns import SERIES, SUMMARY, TOTALS
from experiments.comparison import compare
from experiments.errors import RequestError
from experiments.runfolder import RunFolder, read_runs

DEFAULT_BASELINE = {"method.name": "allreduce"}
"""Where a folder has no sweep.yaml that names one."""


@dataclass(frozen=True)
class Results:
    """A sweep's results; every series has a `run_id` column.

    `evals` has, beside its file's columns, `wan_payload_bytes` and `wan_wire_bytes`: tensor bytes handed to
    the WAN, and layer-2 bytes that left the site uplinks, from the start of training until that evaluation
    (NaN where not known).
    """

    directory: Path
    runs: pd.DataFrame
    steps: pd.DataFrame
    rounds: pd.DataFrame
    evals: pd.DataFrame
    links: pd.DataFrame
    records: dict[str, dict[str, Any]]
    configs: dict[str, dict[str, Any]]
    baseline: dict[str, Any]


def load(directory: str | Path, *, mixed: bool = False) -> Results:
    """Reads a sweep's folder (or one run's); the summary rows are computed anew from the records.

    Raises:
        RequestError: no such folder, no run in it, a record of a newer schema, or valid runs of different code
            versions or machines, which are compared only if `mixed` asks for it.
    """
    directory = Path(directory)
    folders = read_runs(directory)
    if not mixed:
        _refuse_mixture(directory, folders)
    frames = {kind: _together(folders, kind) for kind in SERIES}
    configs = {folder.run_id: folder.config for folder in folders}
    baseline = _baseline(directory)
    rows = _typed(pd.DataFrame([_row(folder) for folder in folders]))
    rows = compare(rows, configs, frames["evals"], baseline)[list(SUMMARY)]
    return Results(
        directory=directory,
        runs=rows.assign(**_varied_columns(configs)),
        steps=frames["steps"],
        rounds=frames["rounds"],
        evals=frames["evals"],
        links=frames["links"],
        records={folder.run_id: folder.record for folder in folders},
        configs=configs,
        baseline=baseline,
    )


def summarise(directory: str | Path) -> pd.DataFrame:
    """Computes the summary rows and writes `summary.parquet`, in one step; returns the rows."""
    results = load(directory, mixed=True)
    path = results.directory / "summary.parquet"
    temporary = path.with_name(path.name + ".tmp")
    results.runs.to_parquet(temporary, index=False)
    temporary.replace(path)
    return results.runs


def table(results: Results, width: int = tables.NARROW) -> Table:
    """For a terminal: configurations with their seeds averaged, then runs that do not count."""
    return tables.rich_table(results.runs, width)


def table_text(results: Results) -> str:
    """The same as plain text, for a log or a file."""
    return tables.plain_text(results.runs)


def _refuse_mixture(directory: Path, folders: list[RunFolder]) -> None:
    """Numbers of different programs or processors are not compared by accident."""
    records = [folder.record for folder in folders if folder.record.get("valid") is True]
    for what, of in (("code version", _code_of), ("machine", _machine_of)):
        found = Counter(of(record) for record in records)
        if len(found) > 1:
            said = ", ".join(f"{name} ({count} runs)" for name, count in found.most_common())
            raise RequestError(
                f"{directory}: found runs of more than one {what}: {said}; allowed is one, or --mixed"
                " (load(..., mixed=True)) to compare them all the same; --resume makes old ones anew"
            )


def _code_of(record: Mapping[str, Any]) -> str:
    return str(record.get("code_version") or record.get("commit") or "unknown")


def _machine_of(record: Mapping[str, Any]) -> str:
    machine = record.get("machine") or {}
    return f"{machine.get('cpu', 'unknown')}, {machine.get('cores', '?')} cores"


def _row(folder: RunFolder) -> dict[str, Any]:
    record, totals, config = folder.record, folder.totals, folder.config
    valid = record.get("valid") is True and record.get("status") == "done"
    status = str(record.get("status") or "failed")
    parallel, method = config.get("parallel") or {}, config.get("method") or {}
    return {
        "run_id": folder.run_id,
        "method": str(totals.get("method") or method.get("name") or "unknown"),
        "status": status,
        "valid": valid,
        "reason": str(record.get("reason") or ("" if valid else f"status {status}, no reason recorded")),
        "seed": record.get("seed", config.get("seed")),
        "replicas": totals.get("replicas", parallel.get("replicas")),
        "stages": totals.get("stages", parallel.get("stages")),
        "local_steps": totals.get("local_steps", method.get("local_steps")),
        "compressor": str(totals.get("compressor") or "none"),
        "evidence": str(record.get("evidence") or _evidence(config)),
        **{key: totals.get(key) for key in TOTALS},
    }


def _evidence(config: Mapping[str, Any]) -> str:
    """What a run that left no record would have been."""
    return "trained" if isinstance(config.get("topology"), Mapping) else "counted"


def _typed(rows: pd.DataFrame) -> pd.DataFrame:
    counts = ["seed", "replicas", "stages", "local_steps", "steps"]
    for column in counts:
        rows[column] = pd.to_numeric(rows[column], errors="coerce").astype("Int64")
    for column in TOTALS:
        if column not in counts:
            rows[column] = pd.to_numeric(rows[column], errors="coerce").astype(float)
    return rows


def _together(folders: list[RunFolder], kind: str) -> pd.DataFrame:
    frames = []
    for folder in folders:
        frame = folder.frames[kind]
        if kind == "evals":
            frame = with_wan_bytes(frame, folder.frames["steps"], folder.frames["links"], folder.totals)
        if not frame.empty:
            frames.append(frame.assign(run_id=folder.run_id))
    extra = ["wan_payload_bytes", "wan_wire_bytes"] if kind == "evals" else []
    columns = ["run_id", *SERIES[kind], *extra]
    if not frames:
        return pd.DataFrame({column: pd.Series(dtype=float) for column in columns})
    whole = pd.concat(frames, ignore_index=True)
    return whole[columns + [column for column in whole.columns if column not in columns]]


def _baseline(directory: Path) -> dict[str, Any]:
    try:
        sweep = yaml.safe_load((directory / "sweep.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return DEFAULT_BASELINE
    found = sweep.get("baseline") if isinstance(sweep, dict) else None
    return found if isinstance(found, dict) else DEFAULT_BASELINE


def _varied_columns(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Every configuration key with more than one value among the runs; a key that a run lacks is None."""
    flat = [overrides.flatten(config) for config in configs.values()]
    columns: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for config in flat for key in config):
        values = [config.get(key) for config in flat]
        texts = {json.dumps(value, sort_keys=True, default=str) for value in values}
        if len(texts) > 1 and key != "name" and key not in SUMMARY:
            columns[key] = _one_type(values)
    return columns


def _one_type(values: list[Any]) -> list[Any]:
    """Parquet columns have one type: numbers as floats, everything else mixed as text."""
    present = [value for value in values if value is not None]
    if all(isinstance(value, bool) for value in present):
        return values
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in present):
        return [math.nan if value is None else float(value) for value in values]
    return [
        None if value is None else value if isinstance(value, str) else json.dumps(value) for value in values
    ]
