"""Which checkpoint a run continues from: the newest that is whole on every rank, or none.

Each rank checks its own parts and says which it could use; what all of them can use is chosen. With another
number of replicas or stages only the weights fit, and whoever reads them needs replica 0's parts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoint import FOLDER, HALF_MADE, VALUES, DamagedError, Place
from trainer.config import TrainerConfig
from trainer.config_errors import ConfigError
from trainer.progress import Progress
from trainer.ranks import World
from trainer.state import State

LAYOUT = ("replicas", "stages", "pieces", "data_parallel")
SAME, WEIGHTS, DAMAGED = "same", "weights", "damaged"
FREE = {"train": {"steps", "timeout_s"}}
"""Keys of the sections that decide the losses which may differ all the same; see `deciding`."""


class ResumeError(ConfigError):
    """The run cannot be continued as asked; one sentence."""


@dataclass(frozen=True)
class Resumed:
    """Where to continue: `state` of the same layout, else only `weights` by Llama name.

    `incomplete` says why the run's times and counts will not be those of the whole run, if so.
    """

    progress: Progress
    state: State | None
    weights: dict[str, Tensor] | None
    about: dict[str, Any]
    sentence: str
    incomplete: str | None = None


def deciding(config: TrainerConfig) -> dict[str, Any]:
    """The keys that decide the losses of a given layout, as plain data."""
    plain = config.model_dump(mode="json", include={"seed", "model", "data", "train", "method"})
    return {
        key: {k: v for k, v in value.items() if k not in FREE.get(key, ())}
        if isinstance(value, dict)
        else value
        for key, value in plain.items()
    }


def describe(config: TrainerConfig, data_sha256: str) -> State:
    """What a checkpoint says about the run that wrote it."""
    parallel = config.parallel
    return {
        **{key: getattr(parallel, key) for key in LAYOUT},
        "data_sha256": data_sha256,
        "config": deciding(config),
    }


def find(config: TrainerConfig, world: World, out: Path, data_sha256: str) -> Resumed | None:
    """Choose and read; collective over all ranks. None where no checkpoint was ever whole.

    Raises:
        ResumeError: those that were are damaged, or of another configuration.
    """
    root = out / FOLDER
    layout = {key: getattr(config.parallel, key) for key in LAYOUT}
    mine = list(_parts(root, world, layout, out))
    said = world.control.gather(json.dumps(mine))
    everybody = [{(int(step), str(kind)) for step, kind in json.loads(text)} for text in said]
    common = {part for part in set.intersection(*everybody) if part[1] != DAMAGED}
    if not common:
        if set.intersection(*({step for step, _ in parts} for parts in everybody)):
            raise ResumeError(f"{root}: every checkpoint there is damaged on some rank")
        world.control.barrier()  # what a kill left unfinished is no checkpoint: the run starts anew
        _forget_newer(root, 0, world)
        world.control.barrier()
        return None
    step, kind = max(common)
    resumed = _same(root, step, world) if kind == SAME else _weights(root, step, world)
    _check(describe(config, data_sha256), resumed.about, root)
    world.control.barrier()  # everybody has read; now what the resumed run will write again may go
    _forget_newer(root, step, world)
    if kind == WEIGHTS and world.rank == 0:
        _set_records_aside(out / "ranks", step)
    world.control.barrier()
    return resumed


def _steps(root: Path) -> list[int]:
    """Steps of which anything is there on this rank's disk, newest first."""
    return sorted(
        (int(path.name[5:]) for path in root.glob("step-*") if path.name[5:].isdecimal()), reverse=True
    )


def _parts(root: Path, world: World, layout: Mapping[str, int], out: Path) -> Iterator[tuple[int, str]]:
    """(step, kind) of every checkpoint of which this rank has what it would read; says what is damaged."""
    for step in _steps(root):
        if not _finished(root, step):
            continue
        try:
            about = _about(root, step)
            same = {key: about[key] for key in LAYOUT} == layout
            places = [Place(root, step, rank) for rank in ([world.rank] if same else range(about["stages"]))]
            if not all(place.folder.is_dir() for place in places):
                continue  # a kill came between two ranks' parts
            for place in places:
                place.verify()
            if same:
                _check_records(places[0], out)
        except DamagedError as damage:
            print(f"{damage}; an earlier checkpoint is used", file=sys.stderr, flush=True)
            yield step, DAMAGED
        else:
            yield step, SAME if same else WEIGHTS


def _finished(root: Path, step: int) -> list[Path]:
    """Ranks' folders that were renamed into place."""
    folders = (root / f"step-{step:08d}").glob("rank-*")
    return sorted(folder for folder in folders if folder.suffix != HALF_MADE)


def _about(root: Path, step: int) -> dict[str, Any]:
    """What the checkpoint says about its run, from any rank's part that can be read."""
    for folder in _finished(root, step):
        try:
            return dict(json.loads((folder / VALUES).read_text(encoding="utf-8"))["about"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    raise DamagedError(f"{root / f'step-{step:08d}'}: no rank's part can be read")


def _check_records(place: Place, out: Path) -> None:
    """The rank's JSON lines must reach as far as the checkpoint says."""
    values = json.loads((place.folder / VALUES).read_text(encoding="utf-8"))
    for name, size in values["progress"]["file_bytes"].items():
        path = out / "ranks" / name
        found = path.stat().st_size if path.is_file() else 0
        if found < size:
            raise DamagedError(f"{path}: found {found} bytes, at least {size} belong to {place.folder}")


def _same(root: Path, step: int, world: World) -> Resumed:
    state = Place(root, step, world.rank).read()
    progress = Progress.from_state(state["progress"])
    return Resumed(progress, state, None, state["about"], f"resumed after step {step}")


def _weights(root: Path, step: int, world: World) -> Resumed:
    weights: dict[str, Tensor] = {}
    for rank in range(_about(root, step)["stages"]):
        state = Place(root, step, rank).read()
        weights |= state["weights"]
    about, old = state["about"], Progress.from_state(state["progress"])
    progress = Progress(step=step, tokens=old.tokens, evaluated_at=old.evaluated_at, checkpointed_at=step)
    sentence = (
        f"resumed after step {step} with {world.replicas} x {world.stages} ranks instead of"
        f" {about['replicas']} x {about['stages']}: kept are the weights, the step and the count of tokens; dropped"
        f" are inner and outer optimiser state, compressor state, exchanges in flight, times and byte counts"
    )
    incomplete = f"times, bytes and records begin after step {step}, where the layout changed"
    return Resumed(progress, None, weights, about, sentence, incomplete)


def _check(wanted: Mapping[str, Any], found: Mapping[str, Any], root: Path) -> None:
    if found["data_sha256"] != wanted["data_sha256"]:
        raise ResumeError(f"data.source: the text is not the one that {root} was trained on")
    difference = first_difference(found["config"], wanted["config"])
    if difference is not None:
        key, before, now = difference
        raise ResumeError(f"{key}: found {now!r}, allowed {before!r} as in {root}")


def first_difference(before: Any, now: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """(dotted key, value before, value now) of the first place where two trees of plain data differ.

    >>> first_difference({"a": {"b": 1}}, {"a": {"b": 2}})
    ('a.b', 1, 2)
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}):
            inner = first_difference(before.get(key), now.get(key), f"{path}.{key}" if path else key)
            if inner is not None:
                return inner
        return None
    return None if before == now else (path, before, now)


def _forget_newer(root: Path, step: int, world: World) -> None:
    """Remove what lies after `step`: it is damaged, half-made, or not whole."""
    for newer in (found for found in _steps(root) if found > step):
        Place(root, newer, world.rank).remove(whole_step=world.rank == 0)


def _set_records_aside(ranks: Path, step: int) -> None:
    """Records of another layout cannot be continued: they move to a folder of their own."""
    aside = ranks / f"until-step-{step}"
    aside.mkdir(exist_ok=True)
    for path in ranks.glob("rank-*"):
        path.replace(aside / path.name)
