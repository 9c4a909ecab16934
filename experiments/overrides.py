"""Dotted keys (`method.local_steps`) in nested mappings: set, look up, merge, flatten."""

import copy
from collections.abc import Mapping
from typing import Any

import yaml

from experiments.errors import RequestError

MISSING = object()
"""What `get_dotted` answers where a key is absent; `None` is a value that YAML can hold."""


def apply_override(data: dict[str, Any], assignment: str) -> None:
    """Set one dotted key in place, its value read as YAML: `method.local_steps=10`.

    Raises:
        RequestError: not KEY=VALUE, the value is not YAML, or a key on the way is not a mapping.
    """
    dotted, equals, text = assignment.partition("=")
    if not equals or not all(dotted.split(".")):
        raise RequestError(f"--set: found {assignment!r}, allowed KEY=VALUE such as method.local_steps=10")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RequestError(f"--set {dotted}: found {text!r}, allowed one YAML value") from error
    try:
        set_dotted(data, dotted, value)
    except RequestError as error:
        raise RequestError(f"--set {error}") from error


def set_dotted(data: dict[str, Any], dotted: str, value: Any) -> None:
    """Set one dotted key in place, making the mappings on its way.

    Raises:
        RequestError: an empty part, or a key on the way holds something else than a mapping.
    """
    *parents, last = dotted.split(".")
    if not all((*parents, last)):
        raise RequestError(
            f"{dotted!r}: found an empty part, allowed a dotted key such as method.local_steps"
        )
    node = data
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise RequestError(f"{dotted}: {parent!r} holds {child!r}, allowed only keys of a mapping")
        node = child
    node[last] = value


def get_dotted(data: Mapping[str, Any], dotted: str) -> Any:
    """The value at a dotted key, or `MISSING`."""
    node: Any = data
    for part in dotted.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return MISSING
        node = node[part]
    return node


def expand_dotted(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1, "a.c": 2}` as `{"a": {"b": 1, "c": 2}}`; values that are mappings may have dotted keys too."""
    nested: dict[str, Any] = {}
    for dotted, value in flat.items():
        inner = expand_dotted(value) if isinstance(value, Mapping) else copy.deepcopy(value)
        before = get_dotted(nested, str(dotted))
        if isinstance(before, dict) and isinstance(inner, dict):
            inner = deep_merge(before, inner)
        set_dotted(nested, str(dotted), inner)
    return nested


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of a nested mapping by dotted key; an empty mapping is a leaf."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{dotted}."))
        else:
            flat[dotted] = value
    return flat


def deep_merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A new mapping: `over` laid upon `base`; mappings merge key by key, anything else is replaced."""
    merged = {key: copy.deepcopy(value) for key, value in base.items()}
    for key, value in over.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            merged[key] = deep_merge(before, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
