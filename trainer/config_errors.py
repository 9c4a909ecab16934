"""Turns what pydantic found into one sentence: file, key, what was found, what is allowed."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

TAG_KEYS = ("name", "mode")
"""Keys that choose between the variants of a section (`method.name`, `compute.mode`)."""


class ConfigError(ValueError):
    """A configuration that cannot be used; the text is one sentence for the person who wrote it."""


def did_you_mean(found: str, valid: Iterable[str]) -> str:
    """A trailing ` (did you mean 'x'?)` naming the nearest of `valid`, or nothing."""
    near = difflib.get_close_matches(found, list(valid), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""


def config_error_sentence(
    error: ValidationError, file: str | Path, model: type[BaseModel] | None = None
) -> str:
    """One sentence for the first problem in `error`.

    Args:
        error: what pydantic raised while checking `model`.
        file: where the person wrote it.
        model: the class that was checked, used to name valid keys; without it they are not named.
    """
    problems = error.errors(include_url=False)
    first = problems[0]
    keys, holder, variants = _walk(model, first["loc"])
    sentence = f"{file}: {_explain(first, keys, holder, variants)}"
    more = len(problems) - 1
    return sentence + (f" (and {more} more problem{'s' if more > 1 else ''})" if more else "")


def _explain(
    problem: Any, keys: list[str], holder: type[BaseModel] | None, variants: list[type[BaseModel]]
) -> str:
    kind, context, found = problem["type"], problem.get("ctx", {}), problem["input"]
    dotted = ".".join(keys)
    valid: list[str] = []
    if kind == "value_error":
        # our own validators write "key: found …, allowed …" themselves
        return f"{dotted}.{context['error']}" if dotted else str(context["error"])
    if kind == "extra_forbidden":
        valid, found = list(holder.model_fields) if holder else [], keys[-1]
        said, allowed = "an unknown key", ", ".join(valid) or "no further key"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        dotted += "." + context["discriminator"].strip("'")
        valid = [tag for variant in variants for tag in _tags(variant)]
        found = context.get("tag", "")
        said, allowed = repr(found) if found else "nothing", ", ".join(valid)
    elif kind == "literal_error":
        allowed = context["expected"].replace("'", "").replace(" or ", ", ")
        said, valid = repr(found), allowed.split(", ")
    elif kind == "missing":
        said, allowed = "nothing", "a value (it is required)"
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        said, allowed = repr(found), "a mapping of keys"
    else:
        said, allowed = repr(found), _lower_first(problem["msg"].removeprefix("Input should be "))
    return f"{dotted}: found {said}, allowed {allowed}{did_you_mean(str(found), valid)}"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _walk(
    model: type[BaseModel] | None, loc: tuple[int | str, ...]
) -> tuple[list[str], type[BaseModel] | None, list[type[BaseModel]]]:
    """Follow a location: the keys as written, the section that holds the last key, its variants.

    pydantic puts the tag of a chosen variant into the location; people do not write it there.
    """
    keys: list[str] = []
    section, holder = model, None
    variants: list[type[BaseModel]] = []
    for part in loc:
        chosen = next((variant for variant in variants if part in _tags(variant)), None)
        if chosen is not None:
            section, variants = chosen, []
            continue
        holder = section
        keys.append(str(part))
        field = holder.model_fields.get(str(part)) if holder else None
        models = _models(field.annotation) if field else []
        section = models[0] if len(models) == 1 else None
        variants = models if len(models) > 1 else []
    return keys, holder, variants


def _tags(model: type[BaseModel]) -> tuple[str, ...]:
    for key in TAG_KEYS:
        field = model.model_fields.get(key)
        if field is not None and get_origin(field.annotation) is Literal:
            return tuple(str(tag) for tag in get_args(field.annotation))
    return ()


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The section classes inside an annotation, through unions and Annotated."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _models(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [model for arg in get_args(annotation) for model in _models(arg)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
