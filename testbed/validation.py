"""Turns YAML that people write into checked, frozen models, or into one sentence that says what is wrong."""

import difflib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from testbed.errors import TopologyError


class Strict(BaseModel):
    """Base of everything that people write: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, serialize_by_alias=True)


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; two sites of one name must not vanish so."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise TopologyError(f"line {line}: key {key!r} found twice, allowed once")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML mapping; duplicate keys, other shapes and unreadable files are TopologyError sentences."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise TopologyError(f"{path}: cannot be read ({reason}), allowed is a readable YAML file") from error
    try:
        data = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 - a SafeLoader subclass
    except TopologyError as error:
        raise TopologyError(f"{path}: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise TopologyError(f"{path}: not valid YAML{where} ({problem})") from error
    if not isinstance(data, dict):
        raise TopologyError(f"{path}: found {type(data).__name__}, allowed is a mapping of keys to values")
    return data


def _valid_names(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Names allowed where an unknown key was found, by walking the model along the error's location."""
    current: Any = model
    choices: list[type[BaseModel]] = []
    for part in location[:-1]:
        field = _fields(current).get(part)
        if field is None:
            # the tag of a union, a dict key or a list index (for those the model stays the same)
            current = next((m for m in choices if part in _tags(m)), current)
            continue
        choices = _models_in(field.annotation)
        current = choices[0] if choices else current
    return sorted(_fields(current))


def _fields(model: Any) -> dict[Any, Any]:
    """Key as it is written (the alias where there is one) -> field."""
    fields = getattr(model, "model_fields", {}) if isinstance(model, type) else {}
    return {field.alias or name: field for name, field in fields.items()}


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    """The verbs that choose a model of events."""
    field = model.model_fields.get("do")
    return getattr(field.annotation, "__args__", ()) if field else ()


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found: list[type[BaseModel]] = []
    for argument in getattr(annotation, "__args__", ()):
        found += _models_in(argument)
    return found


def sentence(error: ValidationError, model: type[BaseModel], file: str) -> str:
    """The first problem of a pydantic error as one sentence: file, key, found, allowed."""
    first = error.errors()[0]
    location = first["loc"]
    key = ".".join(str(part) for part in location) or "(the whole file)"
    if first["type"] == "extra_forbidden":
        names = _valid_names(model, location)
        near = difflib.get_close_matches(str(location[-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"{file}: {key}: unknown key; {hint}allowed: {', '.join(names)}"
    if first["type"] == "missing":
        return f"{file}: {key}: found nothing, allowed is a value: this key is required"
    if first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = first["ctx"]
        name, allowed = context["discriminator"].strip("'"), context.get("expected_tags")
        found = repr(context["tag"]) if "tag" in context else "nothing"
        return f"{file}: {key}.{name}: found {found}, allowed: {allowed or 'a verb, see docs/events.md'}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error" and not location:
        return f"{file}: {message}"
    return f"{file}: {key}: found {first['input']!r}; {message[0].lower()}{message[1:]}"
