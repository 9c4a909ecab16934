"""Compressors as configuration: which codec or factors, and what becomes of what was not sent."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config_base import Count, Section


class CastCompressor(Section):
    """Every value rounded to a floating-point type on the wire; `none` sends fp32."""

    name: Literal["none", "fp16", "bf16"] = "none"
    error_feedback: bool = False


class BlockCompressor(Section):
    """Block-scaled integers: one fp16 scale for each `block` values."""

    name: Literal["int8", "int4"]
    block: Annotated[int, Field(ge=2, strict=True)] = 128
    error_feedback: bool = True


class LowRankCompressor(Section):
    """Low-rank factors in fp32 (`lowrank`) or int4, with an optionally adaptive rank.

    `energy` is the share of the pseudo-gradient's energy that the chosen rank should capture; `window`
    is the number of rounds averaged before the rank moves; the rank stays in [`min_rank`, `max_rank`]
    (default: from a quarter of `rank` up to `rank`) and H never falls below `min_local_steps`.
    """

    name: Literal["lowrank", "lowrank-int4"]
    rank: Count = 32
    adaptive: bool = False
    block: Annotated[int, Field(ge=2, strict=True)] = 128
    error_feedback: bool = True
    min_rank: Count | None = None
    max_rank: Count | None = None
    energy: Annotated[float, Field(gt=0, le=1)] = 0.5
    window: Count = 3
    min_local_steps: Count = 1

    @model_validator(mode="after")
    def _check(self) -> LowRankCompressor:
        low, high = self.rank_bounds
        if not low <= self.rank <= high:
            raise ValueError(f"rank: found {self.rank}, allowed from min_rank {low} to max_rank {high}")
        return self

    @property
    def rank_bounds(self) -> tuple[int, int]:
        """(lowest, highest) rank that adaptation may choose."""
        low = self.min_rank or max(1, self.rank // 4)
        return low, self.max_rank or max(self.rank, low)


CompressorConfig = Annotated[
    CastCompressor | BlockCompressor | LowRankCompressor, Field(discriminator="name")
]
