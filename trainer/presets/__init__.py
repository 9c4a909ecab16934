"""What the authors of each method used: one YAML file a method, which owns that method's defaults.

`method: {name: sparse_loco}` is the method with its source's settings; any key may be overridden, also
single keys of a section (`compressor: {block: 64}` keeps the compressor's name).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import TypeAdapter, model_validator
from pydantic.fields import FieldInfo

from trainer.config_base import Section

FOLDER = Path(__file__).parent


class MethodSection(Section):
    """Base of the methods' configurations: a partly written section is laid upon the default one."""

    @model_validator(mode="before")
    @classmethod
    def _lay_upon_defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        filled = dict(data)
        for key, written in data.items():
            field = cls.model_fields.get(key)
            if isinstance(written, Mapping) and field is not None and isinstance(field.default, Section):
                default = field.default.model_dump()
                same = written.get("name", default.get("name")) == default.get("name")
                filled[key] = {**default, **written} if same else dict(written)
        return filled

    def check_run(self, layers: int, inner: str) -> None:
        """Refuse (ValueError, a sentence) a model of so many layers or an inner optimiser that do not go with it."""


SectionClass = TypeVar("SectionClass", bound=type[MethodSection])


def published(cls: SectionClass) -> SectionClass:
    """Take the defaults of a method's configuration from its preset, checked like what a person writes."""
    fields: dict[str, FieldInfo] = cls.__pydantic_fields__
    (name,) = get_args(fields["name"].annotation)
    for key, value in preset(name)["method"].items():
        field = fields[key]
        annotation: Any = field.annotation
        field.default = TypeAdapter(annotation).validate_python(value)
    cls.model_rebuild(force=True)
    return cls


def preset(name: str) -> dict[str, Any]:
    """Keys `source`, `does`, `trained_with` (what its authors used beside it) and `method`."""
    return dict(yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))
