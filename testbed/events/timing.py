"""When an event happens and how long it lasts, as people write it."""

from typing import Self

from pydantic import Field, model_validator

from testbed.validation import Strict

MIN_PERIOD_S = 0.05
"""Changes more often than this would be later than they are apart on a busy machine."""


class Timed(Strict):
    """When: once at ``at_s``, ``at_step`` or ``at_round``, or every ``every_s`` seconds (from that moment on, or
    for the first time after one period), at most ``times`` times.

    Seconds count from the first training step where a trainer runs, else from the start of the programs. A step or
    round counts once it is completed.
    """

    at_s: float | None = Field(default=None, ge=0, le=1e6)
    at_step: int | None = Field(default=None, ge=1)
    at_round: int | None = Field(default=None, ge=1)
    every_s: float | None = Field(default=None, ge=MIN_PERIOD_S, le=1e6)
    times: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_trigger(self) -> Self:
        given = [self.at_s, self.at_step, self.at_round]
        count = sum(value is not None for value in given)
        if count > 1 or (count == 0 and self.every_s is None):
            raise ValueError("allowed is exactly one of at_s, at_step, at_round (or every_s alone)")
        if self.times is not None and self.every_s is None:
            raise ValueError("times: found without every_s, allowed only together with it")
        return self

    @property
    def when(self) -> str:
        """The trigger in words."""
        first = ""
        if self.at_s is not None:
            first = f"at {self.at_s:g} s"
        elif self.at_step is not None:
            first = f"at step {self.at_step}"
        elif self.at_round is not None:
            first = f"at round {self.at_round}"
        if self.every_s is None:
            return first
        repeated = f"every {self.every_s:g} s" + (f", {self.times} times" if self.times else "")
        return f"{repeated} from {first.removeprefix('at ')} on" if first else repeated


class Lasting(Timed):
    """Something that ends by itself after ``for_s``: what the topology says is restored then."""

    for_s: float | None = Field(default=None, ge=MIN_PERIOD_S, le=1e6)

    @model_validator(mode="after")
    def _over_before_it_comes_again(self) -> Self:
        if self.for_s is not None and self.every_s is not None and self.for_s >= self.every_s:
            raise ValueError(f"for_s: found {self.for_s:g}, allowed is less than every_s ({self.every_s:g})")
        return self

    @property
    def lasting(self) -> str:
        """How long, in words."""
        return f", for {self.for_s:g} s" if self.for_s is not None else ""


Quartiles = tuple[float, float, float, float, float]
"""Least, first quartile, median, third quartile, most: values are drawn evenly between neighbours."""


def ascending(quartiles: Quartiles | None) -> Quartiles | None:
    """The same; raises ValueError where they do not ascend."""
    if quartiles is not None and list(quartiles) != sorted(quartiles):
        raise ValueError("allowed are five ascending numbers: least, quartile, median, quartile, most")
    return quartiles
