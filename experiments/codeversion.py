"""Which code made a run: a hash of the sources that can change a result, whatever git knows of them."""

import hashlib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
LABORATORY = (
    *("accounting", "config", "evidence", "happenings", "pace", "record"),
    *("runner", "series", "storing", "totals", "watch"),
)
"""Modules of `experiments` that take part in a run; figures, tables and commands do not."""


def code_version() -> str:
    """12 hexadecimal digits of the sha256 over names and bytes of the sources of a run."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(f"{path.relative_to(PROJECT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def sources() -> list[Path]:
    """The testbed, the trainer with its presets, and the part of the laboratory that runs them, sorted."""
    found = [p for folder in ("testbed", "trainer") for p in (PROJECT / folder).rglob("*.py")]
    found += (PROJECT / "trainer").rglob("*.yaml")
    found += [PROJECT / "experiments" / f"{name}.py" for name in LABORATORY]
    return sorted(found)
