"""A claim's published and assumed figures, with who read them where."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from experiments.errors import RequestError

CLAIMS = Path(__file__).resolve().parent.parent / "claims"


@dataclass(frozen=True)
class Figure:
    """One published or assumed number. `verified`: somebody here read it in the source itself."""

    name: str
    value: float
    unit: str
    verified: bool
    source: str


@dataclass(frozen=True)
class Claim:
    """`published` by the source, `assumed` by us where the source is silent."""

    id: str
    claim: str
    source: str
    published: dict[str, Figure]
    assumed: dict[str, Figure]

    def __getitem__(self, name: str) -> float:
        """The value of a published or assumed figure."""
        return (self.published.get(name) or self.assumed[name]).value

    @property
    def second_hand(self) -> list[Figure]:
        """Published figures that nobody here could read in the source."""
        return [figure for figure in self.published.values() if not figure.verified]


def load_claim(identity: str) -> Claim:
    """A claim by its id.

    Raises:
        RequestError: there is none of that name.
    """
    path = CLAIMS / f"{identity}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in CLAIMS.glob("*.yaml")))
        raise RequestError(f"claim: found {identity!r}, allowed: {known}")
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    published = {
        name: Figure(name, float(f["value"]), f["unit"], bool(f["verified"]), f["source"])
        for name, f in data["published"].items()
    }
    assumed = {
        name: Figure(name, float(f["value"]), f.get("unit", ""), False, f["why"])
        for name, f in data["assumed"].items()
    }
    return Claim(data["id"], data["claim"], data["source"], published, assumed)
