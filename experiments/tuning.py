"""The same tuning budget for every method: trials drawn from one space, chosen on text that nothing reports.

A method's learning rate decides more than the method: an untuned AllReduce loses to DiLoCo. Hence a
tuning file gives each method equally many trials, drawn from a scrambled Sobol sequence over the keys of
`space` that the method has, and the whole list of trials is kept beside the choice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from experiments import overrides as dotted
from experiments.config import read_mapping
from experiments.errors import RequestError
from experiments.method_keys import method_keys
from experiments.sweep import SweepConfig, sentence

DIGITS = 3
"""Significant digits of a drawn number: enough to tell trials apart, few enough to read."""


class Range(BaseModel):
    """Where one key's values are drawn from: a range, evenly or evenly in the logarithm, or a list."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    log: tuple[float, float] | None = None
    linear: tuple[float, float] | None = None
    choice: Annotated[list[Any], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> "Range":
        given = [kind for kind in ("log", "linear", "choice") if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"found {', '.join(given) or 'nothing'}, allowed is one of log, linear, choice")
        for bounds in (self.log, self.linear):
            if bounds is not None and not bounds[0] < bounds[1]:
                raise ValueError(f"found {list(bounds)}, allowed is [low, high] with low below high")
        if self.log is not None and self.log[0] <= 0:
            raise ValueError(f"log: found {list(self.log)}, allowed are bounds above 0")
        return self

    def at(self, share: float) -> Any:
        """The value at `share` (0 to 1) of the way through."""
        if self.choice is not None:
            return self.choice[min(int(share * len(self.choice)), len(self.choice) - 1)]
        low, high = self.log or self.linear or (0.0, 0.0)
        value = low * (high / low) ** share if self.log else low + (high - low) * share
        return float(f"{value:.{DIGITS}g}")


class TuningConfig(BaseModel):
    """A tuning file: `trials` of each of `methods`, laid upon `base`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    base: dict[str, Any]
    trials: int = Field(ge=1, le=1024, strict=True)
    seed: int = Field(default=0, ge=0, strict=True)
    space: Annotated[dict[str, Range], Field(min_length=1)]
    methods: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]


@dataclass(frozen=True)
class Choice:
    """The best trial of one method; `settings` is an element of a sweep's `list:`."""

    label: str
    settings: dict[str, Any]
    drawn: dict[str, Any]
    loss: float
    trials: int
    valid: int


def load_tuning(path: str | Path) -> TuningConfig:
    """Reads and checks a tuning file.

    Raises:
        RequestError: one sentence with file, key, found and allowed.
    """
    path = Path(path)
    try:
        return TuningConfig.model_validate(read_mapping(path))
    except ValidationError as error:
        raise RequestError(f"{path}: {sentence(error)}") from error


def trials_of(tuning: TuningConfig, label: str) -> list[dict[str, Any]]:
    """The trials of one method, nested, as elements of a sweep's `list:`; always the same ones.

    Keys of `space` below `method.` that the method does not have drop out.
    """
    method, keys = dotted.expand_dotted(tuning.methods[label]), _keys(tuning, label)
    engine: Any = torch.quasirandom.SobolEngine  # without types in torch 2.13
    sobol = engine(max(len(keys), 1), scramble=True, seed=tuning.seed)
    shares = sobol.draw(tuning.trials, dtype=torch.float64).tolist()
    drawn = [
        {key: tuning.space[key].at(share) for key, share in zip(keys, row, strict=False)} for row in shares
    ]
    return [dotted.deep_merge({"method": method}, dotted.expand_dotted(trial)) for trial in drawn]


def as_sweep(tuning: TuningConfig) -> SweepConfig:
    """All trials, method after method, as one sweep: executed and resumed like any; losses of the tuning text."""
    base = dotted.deep_merge(dotted.expand_dotted(tuning.base), {"eval": {"part": "tuning"}})
    variants = [trial for label in tuning.methods for trial in trials_of(tuning, label)]
    return SweepConfig.model_validate({"name": tuning.name, "base": base, "list": variants})


def choose(tuning: TuningConfig, runs: pd.DataFrame, trials: Mapping[str, Sequence[str]]) -> list[Choice]:
    """The valid trial with the lowest loss on the tuning text, for each method.

    Args:
        tuning: what was asked for.
        runs: one row a run, with run_id, valid and val_loss (nats per token).
        trials: run id of every trial, in their order, by label of the method.

    Raises:
        RequestError: a method without a single valid trial.
    """
    valid = runs[runs["valid"].astype(bool)]
    losses = {
        str(run): loss
        for run, loss in zip(valid["run_id"], valid["val_loss"].astype(float), strict=True)
        if math.isfinite(loss)
    }
    choices = []
    for label in tuning.methods:
        scored = [(losses[run], number) for number, run in enumerate(trials[label]) if run in losses]
        if not scored:
            raise RequestError(f"{tuning.name}: {label}: found no valid trial, allowed is at least one")
        loss, number = min(scored)
        settings = trials_of(tuning, label)[number]
        drawn = {key: dotted.get_dotted(settings, key) for key in _keys(tuning, label)}
        choices.append(Choice(label, settings, drawn, loss, len(trials[label]), len(scored)))
    return choices


def write_choices(choices: list[Choice], path: Path) -> None:
    """A YAML file that a sweep names as its `list:`, each element headed by what it won against."""
    text = "# Chosen by `dilocox tune` on held-out text that no reported loss is measured on.\n"
    for choice in choices:
        text += (
            f"# {choice.loss:.4f} nats per token, best of {choice.valid} valid trials of {choice.trials}\n"
        )
        text += yaml.safe_dump({choice.label: choice.settings}, sort_keys=False)
    path.write_text(text, encoding="utf-8")


def _keys(tuning: TuningConfig, label: str) -> list[str]:
    """The keys of the space that a method has."""
    allowed = method_keys(dotted.expand_dotted(tuning.methods[label]))
    return [
        key for key in tuning.space if not key.startswith("method.") or key.removeprefix("method.") in allowed
    ]
