"""Everything about a run that is not a measurement series: where, with what, and whether it may be believed."""

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from experiments.codeversion import code_version

SCHEMA_VERSION = 1
PROJECT = Path(__file__).resolve().parent.parent
_PACKAGES = ("torch", "numpy", "mininet", "pydantic", "pandas", "pyarrow", "matplotlib", "dilocox-testbed")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that shape a result."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def code_state() -> tuple[str | None, bool | None]:
    """(commit, dirty) of the checkout that this code runs from; (None, None) outside git."""
    git = ["git", "-c", f"safe.directory={PROJECT}", "-C", str(PROJECT)]
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        status = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None, None
    return commit, bool(status.strip())


def machine() -> dict[str, Any]:
    """Processor, number of cores and memory."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": model, "cores": os.cpu_count(), "memory_gib": round(memory / 2**30, 1)}


def environment() -> dict[str, Any]:
    """The part of a record that tells where and with what a run was made."""
    commit, dirty = code_state()
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": versions(),
        "commit": commit,
        "dirty": dirty,
        "code_version": code_version(),
        "kernel": platform.release(),
        "machine": machine(),
    }


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes in one step: a reader sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(data, indent=2, allow_nan=False, default=str) + "\n", encoding="utf-8")
    temporary.replace(path)
