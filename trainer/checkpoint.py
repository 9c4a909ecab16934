"""One rank's checkpoints: written whole or not at all, checked bit by bit, the last few kept.

    checkpoints/step-00000040/rank-1/state.safetensors   every tensor
                                     state.json          every plain value, and where each tensor belongs
                                     manifest.json       sha256 of the two

A rank's folder is written under another name, flushed to the disk and renamed. A checkpoint is whole when
all ranks' folders are, wherever their disks are: ranks agree on it when they resume (`trainer.resume`), so
sites need no common file system. torch's distributed checkpoint is not used because its index is a pickle.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.state import State, StateError, join_state, split_state
from trainer.tensor_file import TensorFileError, read_tensors, write_tensors

FOLDER = "checkpoints"
TENSORS, VALUES, MANIFEST = "state.safetensors", "state.json", "manifest.json"
HALF_MADE = ".part"


class DamagedError(ValueError):
    """A rank's part of a checkpoint cannot be trusted; one sentence that names file and fault."""


@dataclass(frozen=True)
class Place:
    """Where one rank's part of the checkpoint after `step` lies, inside a folder of checkpoints."""

    root: Path
    step: int
    rank: int

    @property
    def folder(self) -> Path:
        """The rank's own folder."""
        return self.root / f"step-{self.step:08d}" / f"rank-{self.rank}"

    def write(self, tensors: Mapping[str, Tensor], tree: Mapping[str, Any]) -> None:
        """Write and rename; what lay there before is replaced.

        Raises:
            OSError: the disk is full, for example; the half-made folder is removed.
        """
        half_made = self.folder.with_name(self.folder.name + HALF_MADE)
        shutil.rmtree(half_made, ignore_errors=True)
        try:
            half_made.mkdir(parents=True)
            digests = {TENSORS: write_tensors(half_made / TENSORS, tensors)}
            digests[VALUES] = _write_text(half_made / VALUES, json.dumps(tree, allow_nan=False))
            _write_text(half_made / MANIFEST, json.dumps({"sha256": digests}, indent=2) + "\n")
            _flush(half_made)
            shutil.rmtree(self.folder, ignore_errors=True)
            half_made.rename(self.folder)
            _flush(self.folder.parent)
            _flush(self.root)
        except OSError:
            shutil.rmtree(half_made, ignore_errors=True)
            raise

    def verify(self) -> None:
        """Compare every file with the manifest.

        Raises:
            DamagedError: something is missing, cut short or changed.
        """
        path = self.folder / MANIFEST
        try:
            digests = json.loads(path.read_text(encoding="utf-8"))["sha256"]
            wanted = {name: digests[name] for name in (TENSORS, VALUES)}
        except OSError as error:
            raise DamagedError(f"{path}: cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{path}: is not a manifest") from error
        for name, digest in wanted.items():
            file = self.folder / name
            try:
                with file.open("rb") as stream:
                    found = hashlib.file_digest(stream, "sha256").hexdigest()
            except OSError as error:
                raise DamagedError(f"{file}: cannot be read: {error.strerror or error}") from error
            if found != digest:
                raise DamagedError(f"{file}: its sha256 is not the one in {MANIFEST}")

    def read(self) -> State:
        """The state, after `verify`.

        Raises:
            DamagedError: see `verify`.
        """
        self.verify()
        try:
            tree = json.loads((self.folder / VALUES).read_text(encoding="utf-8"))
            state = join_state(read_tensors(self.folder / TENSORS), tree)
        except (OSError, ValueError, StateError, TensorFileError) as error:
            raise DamagedError(f"{self.folder}: {error}") from error
        return dict(state)

    def remove(self, *, whole_step: bool = False) -> None:
        """Remove this rank's part, and the step's folder with the last one, or at once if `whole_step`."""
        step_folder = self.folder.parent
        if whole_step:
            shutil.rmtree(step_folder, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.rmtree(self.folder.with_name(self.folder.name + HALF_MADE), ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty, or another rank was faster
            step_folder.rmdir()


def saved_steps(root: Path, rank: int) -> list[int]:
    """Steps after which this rank wrote its part, newest first; nothing is checked."""
    found = [re.fullmatch(r"step-(\d+)", path.name) for path in root.glob("step-*")]
    steps = [int(match[1]) for match in found if match]
    return sorted((s for s in steps if Place(root, s, rank).folder.is_dir()), reverse=True)


class Checkpoints:
    """Writes this rank's parts in a background thread while training goes on; keeps the last `keep`.

    `barrier` returns once every rank has called it equally often.
    """

    def __init__(self, root: Path, rank: int, keep: int, barrier: Callable[[], None]) -> None:
        self.root, self.rank, self.keep = root, rank, keep
        self._barrier = barrier
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def settle(self) -> None:
        """Until the last `save` is whole on every rank; then what is older than the newest `keep` goes.

        Raises:
            OSError: it could not be written.
        """
        if self._writing is None:
            return
        self._writing.result()
        self._writing = None
        self._barrier()
        # rank 0 removes the others' parts too where it sees them: a run of more ranks may have left some
        for step in saved_steps(self.root, self.rank)[self.keep :]:
            Place(self.root, step, self.rank).remove(whole_step=self.rank == 0)

    def save(self, step: int, state: State, first: Sequence[Callable[[], None]] = ()) -> None:
        """Copy `state` now; in the background call `first` and write the copy. `settle` comes before."""
        tensors, tree = split_state(state)
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}

        def write() -> None:
            for call in first:
                call()
            Place(self.root, step, self.rank).write(copies, tree)

        self._writing = self._writer.submit(write)

    def close(self) -> None:
        """Settle, and end the thread."""
        self.settle()
        self._writer.shutdown()


def _write_text(path: Path, text: str) -> str:
    """Write and flush to the disk; returns the sha256 (hex)."""
    raw = text.encode()
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(raw).hexdigest()


def _flush(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
