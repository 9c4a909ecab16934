"""Where the seconds went, and files that survive a SIGKILL."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUCKETS = ("compute_s", "bubble_s", "compress_s", "exposed_comm_s", "checkpoint_s", "other_s")
"""Every second of training is in exactly one of these."""

EVALUATION, SETUP = "evaluation_s", "setup_s"
"""Time that counts neither as training nor in any bucket."""


class Ledger:
    """Gives every second to the innermost open span; `base` gets what no span claims.

    Spans nest and are exclusive, so the buckets add up to the wall time by construction. One ledger
    belongs to one thread.
    """

    def __init__(self, base: str = "other_s") -> None:
        self.seconds: dict[str, float] = dict.fromkeys((*BUCKETS, EVALUATION, SETUP), 0.0)
        self._open = [base]
        self._mark = time.perf_counter()

    def _settle(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._mark
        self._mark = now

    @contextmanager
    def span(self, bucket: str) -> Iterator[None]:
        """Book the time inside to `bucket`, except what inner spans claim."""
        self._settle()
        self._open.append(bucket)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    def carry_on(self, seconds: Mapping[str, float]) -> None:
        """Start from an earlier process's reading; set-up time of both adds up."""
        self._settle()
        setup_s = self.seconds[SETUP]
        self.seconds |= seconds
        self.seconds[SETUP] += setup_s

    def read(self) -> dict[str, float]:
        """Seconds so far by bucket, those outside training included."""
        self._settle()
        return dict(self.seconds)


def training_s(seconds: Mapping[str, float]) -> float:
    """Wall time of training: without setting up and evaluation."""
    return sum(seconds[bucket] for bucket in BUCKETS)


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """`after` - `before`, key by key."""
    return {key: after[key] - before[key] for key in after}


class JsonLines:
    """A JSON-lines file, one complete flushed line per record; continues after `keep_bytes` of an earlier one."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.name = path.name
        self._file = path.open("r+b" if keep_bytes else "wb")
        self._file.truncate(keep_bytes)
        self._file.seek(keep_bytes)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; NaN and infinity are written as null."""
        self._file.write((json.dumps(_finite(record), allow_nan=False) + "\n").encode())
        self._file.flush()

    def size(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    def flush_to_disk(self) -> None:
        """Return once what was written would survive a power cut; may run beside `write`."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; what was written is already there."""
        self._file.close()


def whole_lines_bytes(path: Path) -> int:
    """Length of a file up to its last complete line; 0 where there is none."""
    return path.read_bytes().rfind(b"\n") + 1 if path.is_file() else 0


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON file atomically: it is there complete, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half_made = path.with_name(path.name + ".part")
    half_made.write_text(json.dumps(_finite(record), allow_nan=False, indent=2) + "\n", encoding="utf-8")
    half_made.replace(path)


def _finite(value: Any) -> Any:
    """`value` with floats that JSON cannot hold replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
