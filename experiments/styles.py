"""Names, colours and markers of methods, read from the one file that owns them."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

STYLES = Path(__file__).with_name("styles.yaml")


@dataclass(frozen=True)
class Style:
    """How one method looks: `order` is its place in figures and tables."""

    label: str
    colour: str
    marker: str
    line: str
    order: int


@cache
def _file() -> dict[str, Any]:
    return dict(yaml.safe_load(STYLES.read_text(encoding="utf-8")))


def style_of(method: str) -> Style:
    """The style of a method; one that styles.yaml does not have gets its own name, in grey, last."""
    methods: dict[str, dict[str, str]] = _file()["methods"]
    if method not in methods:
        return Style(method, "#555555", ".", "-", len(methods))
    return Style(**methods[method], order=list(methods).index(method))


def time_styles() -> dict[str, dict[str, str]]:
    """Column of seconds -> label, colour, hatch, in stacking order."""
    return dict(_file()["time"])


def variant_styles() -> dict[str, list[str]]:
    """`markers` and `lines` for several configurations of one method."""
    return dict(_file()["variants"])
