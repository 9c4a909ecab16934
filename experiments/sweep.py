"""From one sweep file to the runs it stands for: pure planning, nothing is started here."""

import copy
import difflib
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from experiments import overrides as dotted
from experiments.config import read_mapping
from experiments.errors import RequestError
from experiments.method_keys import method_keys
from experiments.overrides import MISSING

Validate = Callable[[dict[str, Any]], dict[str, Any]]
"""Resolves and checks a run's mapping; raises RequestError for a bad one."""

MethodKeys = Callable[[Mapping[str, Any]], set[str]]
"""Dotted keys, below `method.`, that a method section may have."""

Values = Annotated[list[Any], Field(min_length=1)]
_NAME_LIKE_A_FOLDER = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class SweepConfig(BaseModel):
    """A sweep as people write it; unknown keys are refused. `list` may name a file that `dilocox tune` wrote.

    Every element of `list`, crossed with every combination of `grid`, every row of `zip` and every seed,
    is laid upon `base`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", serialize_by_alias=True)

    name: str = Field(pattern=_NAME_LIKE_A_FOLDER)
    base: str | dict[str, Any]
    baseline: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Values] = Field(default_factory=dict)
    rows: dict[str, Values] = Field(default_factory=dict, alias="zip")
    variants: list[dict[str, Any]] = Field(default_factory=list, alias="list")
    seeds: list[Annotated[int, Field(ge=0, strict=True)]] = Field(default_factory=list)
    folder: Path = Field(default=Path(), exclude=True)

    @model_validator(mode="after")
    def _consistent(self) -> "SweepConfig":
        lengths = {key: len(values) for key, values in self.rows.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{key} has {length}" for key, length in lengths.items())
            raise ValueError(f"zip: {found} values, allowed are equally long lists")
        places = [("grid", key) for key in self.grid] + [("zip", key) for key in self.rows]
        places += [("list", key) for key in {key for v in self.variants for key in _leaves(v)}]
        if self.seeds:
            places.append(("seeds", "seed"))
        for (where, key), (there, other) in itertools.combinations(places, 2):
            if where != there and f"{other}.".startswith(f"{key}."):
                raise ValueError(f"{there}: {other!r} is set by {where} ({key!r}) too, allowed in one place")
            if where != there and f"{key}.".startswith(f"{other}."):
                raise ValueError(f"{where}: {key!r} is set by {there} ({other!r}) too, allowed in one place")
        return self

    def plain(self) -> dict[str, Any]:
        """As plain data with the keys that people write; the base is inline."""
        return self.model_dump(mode="json", by_alias=True)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: a stable id, the complete configuration, and what distinguishes it."""

    run_id: str
    config: dict[str, Any]
    varied: dict[str, Any] = field(default_factory=dict)


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Reads a sweep file; the run that `base` names is read too and becomes part of it.

    Args:
        path: the sweep's YAML file.
        overrides: `key.of.a.run=VALUE`, laid upon the base before the sweep's own keys.

    Raises:
        RequestError: one sentence with file, key, found and allowed.
    """
    path = Path(path)
    data = read_mapping(path)
    allowed = [f.alias or name for name, f in SweepConfig.model_fields.items() if name != "folder"]
    for key in data:
        if key not in allowed:
            raise RequestError(
                f"{path}: {key}: found an unknown key, allowed {', '.join(allowed)}{_near(key, allowed)}"
            )
    if isinstance(listed := data.get("list"), str):  # a file whose values are the elements
        data = {**data, "list": list(read_mapping(path.parent / listed).values())}
    try:
        sweep = SweepConfig.model_validate({**data, "folder": path.resolve().parent})
    except ValidationError as error:
        raise RequestError(f"{path}: {sentence(error)}") from error
    base = sweep.base
    if isinstance(base, str):
        base = read_mapping(path.parent / base)
    base = dotted.expand_dotted(base)
    for assignment in overrides:
        dotted.apply_override(base, assignment)
    return sweep.model_copy(update={"base": base})


def expand(
    sweep: SweepConfig, validate: Validate, keys_of_method: MethodKeys = method_keys
) -> list[PlannedRun]:
    """The runs of a sweep in a stable order, equal ones merged.

    Order: elements of `list`, then `grid` (its last key fastest), then rows of `zip`, then seeds. A run's id
    depends on its own configuration only, so editing a sweep adds and removes runs and renames none.

    Raises:
        RequestError: a run that `validate` refuses, a key that no method has, a baseline that matches no run.
    """
    runs: dict[str, PlannedRun] = {}
    used: set[str] = set()
    dropped: dict[str, set[str]] = {}
    for point in _points(sweep):
        config, gone, allowed = _without_foreign_keys(_laid_upon_base(sweep, point), keys_of_method)
        used |= allowed
        for key in gone:
            dropped.setdefault(key, set()).update(allowed)
        resolved = validate(config)
        identity = run_id(resolved)
        runs.setdefault(identity, PlannedRun(identity, resolved))
    for key, names in dropped.items():
        if key not in used:
            raise RequestError(
                f"sweep {sweep.name}: method.{key}: no method of this sweep has this key,"
                f" allowed {', '.join(sorted(names))}{_near(key, names)}"
            )
    if sweep.baseline and not any(matches(run.config, sweep.baseline) for run in runs.values()):
        raise RequestError(
            f"sweep {sweep.name}: baseline: found {_said(sweep.baseline)}, which matches none of its"
            f" {len(runs)} runs, allowed is what at least one run has"
        )
    varied = _varied_keys(sweep, [run.config for run in runs.values()])
    return [
        PlannedRun(
            run.run_id, run.config, {k: v for k in varied if (v := _get(run.config, k)) is not MISSING}
        )
        for run in runs.values()
    ]


def ids_by_point(
    sweep: SweepConfig, validate: Validate, keys_of_method: MethodKeys = method_keys
) -> list[str]:
    """The run id of every point of a sweep in `expand`'s order, equal ones not merged."""
    return [
        run_id(validate(_without_foreign_keys(_laid_upon_base(sweep, point), keys_of_method)[0]))
        for point in _points(sweep)
    ]


def matches(config: Mapping[str, Any], baseline: Mapping[str, Any]) -> bool:
    """Whether a run's configuration has every (dotted) key of `baseline` with its value."""
    wanted = dotted.flatten(dotted.expand_dotted(baseline))
    return all(dotted.get_dotted(config, key) == value for key, value in wanted.items())


def run_id(config: Mapping[str, Any]) -> str:
    """`method[-hH][-compressor[-rR]]-sSEED-HASH`: readable, and the same for the same configuration.

    HASH is 8 hexadecimal digits of the sha256 of the resolved configuration as canonical JSON; `name` is
    a label, not part of what is run, and left out.
    """
    method = config.get("method", {})
    parts = [str(method.get("name", "run"))]
    if "local_steps" in method:
        parts.append(f"h{method['local_steps']}")
    compressor = method.get("compressor")
    if isinstance(compressor, Mapping) and compressor.get("name", "none") != "none":
        parts.append(str(compressor["name"]))
        parts += [f"r{compressor['rank']}"] if "rank" in compressor else []
    if (wire := method.get("wire", "fp32")) != "fp32":
        parts.append(str(wire))
    parts.append(f"s{config.get('seed', 0)}")
    content = {key: value for key, value in config.items() if key != "name"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return "-".join([*parts, hashlib.sha256(canonical.encode()).hexdigest()[:8]])


def _points(sweep: SweepConfig) -> list[dict[str, Any]]:
    """What each run before merging lays upon the base, nested."""
    variants = [dotted.expand_dotted(variant) for variant in sweep.variants] or [{}]
    grid = [dict(zip(sweep.grid, row, strict=True)) for row in itertools.product(*sweep.grid.values())]
    rows = [dict(zip(sweep.rows, row, strict=True)) for row in zip(*sweep.rows.values(), strict=True)] or [{}]
    seeds = [{"seed": seed} for seed in sweep.seeds] or [{}]
    return [
        dotted.deep_merge(variant, dotted.expand_dotted({**cell, **row, **seed}))
        for variant, cell, row, seed in itertools.product(variants, grid, rows, seeds)
    ]


def _laid_upon_base(sweep: SweepConfig, point: Mapping[str, Any]) -> dict[str, Any]:
    base = {} if isinstance(sweep.base, str) else sweep.base
    config = dotted.deep_merge({"name": sweep.name, **base}, point)
    topology = config.get("topology")
    if isinstance(topology, str) and not Path(topology).is_file():
        places = [sweep.folder / topology, *(parent / topology for parent in sweep.folder.parents)]
        config["topology"] = next((str(place) for place in places if place.is_file()), topology)
    return config


def _without_foreign_keys(
    config: dict[str, Any], keys_of_method: MethodKeys
) -> tuple[dict[str, Any], list[str], set[str]]:
    """(config, keys below `method.` that were taken out, keys that this method may have)."""
    method = config.get("method")
    if not isinstance(method, Mapping):
        return config, [], set()
    allowed = keys_of_method(method)
    gone: list[str] = []

    def keep(section: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        kept: dict[str, Any] = {}
        for key, value in section.items():
            name = f"{prefix}{key}"
            if name not in allowed and value and isinstance(value, Mapping):
                gone.extend(f"{name}.{leaf}" for leaf in _leaves(value))
            elif name not in allowed:
                gone.append(name)
            elif isinstance(value, Mapping):
                inner = keep(value, f"{name}.")
                if inner or not value:  # a section of which this method knows nothing goes as a whole
                    kept[key] = inner
            else:
                kept[key] = value
        return kept

    return {**copy.deepcopy(config), "method": keep(method, "")}, gone, allowed


def _varied_keys(sweep: SweepConfig, configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that the sweep sets and that have more than one value among its runs, in the sweep's order."""
    named: dict[str, None] = {}
    for point in _points(sweep):
        named.update(dict.fromkeys(_leaves(point)))
    return [key for key in named if len({_frozen(_get(config, key)) for config in configs}) > 1]


def _leaves(section: Mapping[str, Any]) -> list[str]:
    return list(dotted.flatten(dotted.expand_dotted(section)))


def _get(config: Mapping[str, Any], key: str) -> Any:
    return dotted.get_dotted(config, key)


def _frozen(value: Any) -> str:
    return "(missing)" if value is MISSING else json.dumps(value, sort_keys=True, default=str)


def _near(found: str, valid: Sequence[str] | set[str]) -> str:
    near = difflib.get_close_matches(found, sorted(valid), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _said(mapping: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in mapping.items())


def sentence(error: ValidationError) -> str:
    """What pydantic found wrong first: key, found and allowed."""
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    key = ".".join(str(part) for part in first["loc"] if part not in ("str", "dict[str,any]"))
    if first["type"] == "missing":
        return f"{key}: found nothing, allowed a value (it is required)"
    return f"{key}: found {first['input']!r}, {message[:1].lower()}{message[1:]}"
