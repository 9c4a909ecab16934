"""Weights alone: written at the end of a run, read by a run of any layout, exported from here.

    weights/stage-0.safetensors   outer parameters under their names in a Llama checkpoint
            weights.json          shape, step, text, and the sha256 of every stage's file

The stages of replica 0 write one file each; rank 0 adds the index when all are there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config_errors import ConfigError
from trainer.model import canonical_name
from trainer.ranks import World
from trainer.tensor_file import TensorFileError, read_tensors, write_tensors

FOLDER = "weights"
INDEX = "weights.json"


def write_weights(
    out: Path, world: World, parameters: Mapping[str, Tensor], about: Mapping[str, Any], *, lead: bool
) -> None:
    """Write the lead replica's outer parameters, each file in one step; collective over all ranks.

    Args:
        out: the run's folder.
        world: who writes what.
        parameters: of this rank, under their own names.
        about: plain data for the index.
        lead: whether this rank's replica is the first that is alive.

    Raises:
        OSError: a file cannot be written.
    """
    folder, name, digest = out / FOLDER, f"stage-{world.stage}.safetensors", ""
    if lead:
        folder.mkdir(parents=True, exist_ok=True)
        half_made = folder / f"{name}.part"
        named = {canonical_name(n): p for n, p in parameters.items()}
        digest = write_tensors(half_made, named, {"format": "pt"})
        half_made.replace(folder / name)
    digests = world.control.gather(digest)[: world.stages]
    if lead and world.stage == 0:
        named_digests = {f"stage-{stage}.safetensors": digest for stage, digest in enumerate(digests)}
        half_made = folder / f"{INDEX}.part"
        half_made.write_text(
            json.dumps({**about, "sha256": named_digests}, indent=2) + "\n", encoding="utf-8"
        )
        half_made.replace(folder / INDEX)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Weights by Llama name, from a run's folder, a folder of safetensors files, or one such file.

    Where there is an index, its digests are checked and only its files are read.

    Raises:
        TensorFileError: nothing there, or not what it says; one sentence.
    """
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    if folder.is_file():
        return read_tensors(folder)
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        try:
            digests = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["sha256"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TensorFileError(f"{folder / INDEX}: cannot be read ({error})") from error
        files = [folder / name for name in sorted(digests)]
        for file in files:
            if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digests[file.name]:
                raise TensorFileError(f"{file}: its sha256 is not the one in {INDEX}")
    if not files:
        raise TensorFileError(
            f"{path}: found no weights, allowed is a run that has ended, a folder or a file of safetensors"
        )
    merged: dict[str, Tensor] = {}
    for file in files:
        merged |= read_tensors(file)
    return merged


def load_weights(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor], source: Path) -> None:
    """parameters <- their weights; a stage takes what is its own and leaves the rest.

    Raises:
        ConfigError: a parameter is missing or has another shape.
    """
    for name, parameter in parameters.items():
        found = weights.get(canonical_name(name))
        if found is None or found.shape != parameter.shape:
            raise ConfigError(
                f"{source}: {canonical_name(name)}: found {'nothing' if found is None else list(found.shape)},"
                f" allowed {list(parameter.shape)} as the model's configuration says"
            )
        with torch.no_grad():
            parameter.copy_(found)


def load_initial(
    parameters: Mapping[str, nn.Parameter], init_from: str | None, weights: Mapping[str, Tensor] | None
) -> None:
    """parameters <- `weights` where there are some, else those in `init_from`, else what was seeded stays.

    Raises:
        ConfigError: `init_from` cannot be read or does not fit.
    """
    if weights is None and init_from is None:
        return
    source = Path(init_from or "the checkpoint")
    if weights is None:
        try:
            weights = read_weights(source)
        except TensorFileError as error:
            raise ConfigError(f"model.init_from: {error}") from error
    load_weights(parameters, weights, source)
