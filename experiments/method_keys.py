"""Which keys a method of a run may have, read from the trainer's own configuration classes."""

import types
from collections.abc import Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from trainer.config import TrainerConfig


def method_keys(method: Mapping[str, Any]) -> set[str]:
    """Dotted keys, without the leading `method.`, that a method section like this one may have.

    Where a section has variants (`compressor.name`), the keys are those of the variant that is named;
    a variant that is not named, or not known, allows the keys of all, so that validation names the fault.
    """
    return _keys(_classes(TrainerConfig.model_fields["method"].annotation), method, "")


def _keys(variants: list[type[BaseModel]], section: Mapping[str, Any], prefix: str) -> set[str]:
    named = [variant for variant in variants if _accepts(variant, section)]
    found: set[str] = set()
    for variant in named or variants:
        for key, field in variant.model_fields.items():
            found.add(f"{prefix}{key}")
            inner = _classes(field.annotation)
            below = section.get(key)
            if get_origin(field.annotation) is dict and isinstance(below, Mapping):
                found |= _leaves(below, f"{prefix}{key}.")  # a custom method's own options: checked by it
            if inner:
                found |= _keys(inner, below if isinstance(below, Mapping) else {}, f"{prefix}{key}.")
    return found


def _leaves(section: Mapping[str, Any], prefix: str) -> set[str]:
    found: set[str] = set()
    for key, value in section.items():
        found.add(f"{prefix}{key}")
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{prefix}{key}.")
    return found


def _accepts(variant: type[BaseModel], section: Mapping[str, Any]) -> bool:
    field = variant.model_fields.get("name")
    return field is None or section.get("name") in get_args(field.annotation)


def _classes(annotation: Any) -> list[type[BaseModel]]:
    """The section classes inside an annotation, through unions and Annotated."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _classes(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [found for argument in get_args(annotation) for found in _classes(argument)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
