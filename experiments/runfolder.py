"""Reads what a run left in its folder; a file that is missing is an empty frame, never an error."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from experiments.columns import SERIES
from experiments.errors import RequestError
from experiments.record import SCHEMA_VERSION


@dataclass(frozen=True)
class RunFolder:
    """One run as its files tell it: `record` is `record.json`, `config` is `config.yaml`."""

    run_id: str
    record: dict[str, Any]
    config: dict[str, Any]
    frames: dict[str, pd.DataFrame]

    @property
    def totals(self) -> dict[str, Any]:
        """The record's `totals`, empty where there are none."""
        return section(self.record, "totals")


def section(record: dict[str, Any], key: str) -> dict[str, Any]:
    """A mapping inside a record, empty where it is missing or null."""
    found = record.get(key)
    return found if isinstance(found, dict) else {}


def read_runs(directory: str | Path) -> list[RunFolder]:
    """All runs in a sweep's folder, or the one run whose folder it is, ordered by run id.

    Raises:
        RequestError: no such folder, no run in it, or a record written by a newer version.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise RequestError(f"{directory}: found no such folder, allowed is the folder of a sweep or of a run")
    folders = [directory] if _is_run(directory) else sorted(f for f in directory.iterdir() if _is_run(f))
    if not folders:
        raise RequestError(
            f"{directory}: found no run in it, allowed is a folder whose subfolders hold a record.json"
        )
    return [_read_run(folder) for folder in folders]


def _is_run(folder: Path) -> bool:
    return (folder / "record.json").is_file() or (folder / "config.yaml").is_file()


def _read_run(folder: Path) -> RunFolder:
    frames = {kind: _read_frame(folder / f"{kind}.parquet", columns) for kind, columns in SERIES.items()}
    run_id = folder.resolve().name
    return RunFolder(
        run_id, _read_record(folder / "record.json"), _read_config(folder / "config.yaml"), frames
    )


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {"status": "failed", "valid": False, "reason": "no record.json: the run was cut short"}
    except (OSError, ValueError) as error:
        return {"status": "failed", "valid": False, "reason": f"record.json cannot be read ({error})"}
    if not isinstance(record, dict):
        return {"status": "failed", "valid": False, "reason": "record.json holds no mapping"}
    version = record.get("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise RequestError(
            f"{path}: schema_version: found {version!r}, allowed up to {SCHEMA_VERSION}:"
            " this run was written by a newer version of the testbed"
        )
    return record


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _read_frame(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(path)
    except (OSError, ValueError):
        frame = pd.DataFrame()
    missing = [column for column in columns if column not in frame.columns]
    return frame.assign(**dict.fromkeys(missing, float("nan")))
