"""What a stateful part hands over to be kept: a tree of tensors and plain values, and nothing else.

A state is a mapping with string keys whose leaves are tensors or what JSON holds exactly (None, bool, int,
finite float, str, lists of those). Parts nest: an error feedback's state holds that of what it wraps. So a
checkpoint is one file of tensors and one of JSON, and reading it can run no code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Any]

_REFERENCE = "$tensor"


class StateError(ValueError):
    """A state holds what cannot be kept, or does not fit the part it is given to; one sentence."""


def split_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by path, JSON tree that refers to them); `join_state` is the inverse.

    >>> split_state({"a": {"w": torch.ones(1)}, "n": 3})[1]
    {'a': {'w': {'$tensor': 'a/w'}}, 'n': 3}

    Raises:
        StateError: a key is not a plain string, or a leaf is neither a tensor nor plain; names the path.
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _split(state, "", tensors)


def _split(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {_REFERENCE: path}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or "/" in key or key == _REFERENCE:
                raise StateError(
                    f"state {path or '(top)'}: found the key {key!r}, allowed a string without '/'"
                )
        return {key: _split(item, f"{path}/{key}" if path else key, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_split(item, path, tensors) for item in value]
        if any(isinstance(item, Mapping) for item in items):
            raise StateError(
                f"state {path}: found a list that holds a mapping or a tensor, allowed plain items"
            )
        return items
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise StateError(f"state {path}: found {value!r}, allowed a tensor or a plain JSON value")


def join_state(tensors: Mapping[str, Tensor], tree: Any) -> Any:
    """The state whose parts `split_state` gave.

    Raises:
        StateError: the tree refers to a tensor that is not there.
    """
    if isinstance(tree, dict):
        if set(tree) == {_REFERENCE}:
            path = tree[_REFERENCE]
            if path not in tensors:
                raise StateError(f"state {path}: the tensor is missing")
            return tensors[path]
        return {key: join_state(tensors, item) for key, item in tree.items()}
    return tree


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> State:
    """What `optimizer` keeps for each parameter, by name; groups and rates come from the configuration."""
    return {name: dict(optimizer.state[p]) for name, p in parameters.items() if p in optimizer.state}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]
) -> None:
    """The inverse of `optimizer_state`.

    Raises:
        StateError: it is of other parameters.
    """
    check_keys("optimiser", set(state) - set(parameters), set())
    optimizer.state.clear()
    for name, kept in state.items():
        optimizer.state[parameters[name]] = dict(kept)


def take_tensors(
    what: str, state: Mapping[str, Any], like: Mapping[str, Tensor | torch.Size]
) -> dict[str, Tensor]:
    """The tensors of `state`, checked to have the names and shapes of `like`.

    Raises:
        StateError: names or shapes differ.
    """
    check_keys(what, set(state), set(like))
    for name, wanted in like.items():
        shape = wanted.shape if isinstance(wanted, Tensor) else wanted
        if state[name].shape != shape:
            raise StateError(
                f"state of {what}: {name}: found the shape {list(state[name].shape)}, allowed {list(shape)}"
            )
    return {name: state[name] for name in like}


def check_keys(what: str, found: set[str], allowed: set[str]) -> None:
    """Refuse a state with other names, naming the first.

    Raises:
        StateError: the two differ.
    """
    if found != allowed:
        odd = sorted(found ^ allowed)[0]
        raise StateError(f"state of {what}: {odd}: {'unknown' if odd in found else 'missing'}")
