"""How replicas agree, as configuration: methods, compressors, outer optimisers; each has its own keys only."""

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


class NesterovOuter(Section):
    """SGD with Nesterov momentum on the pseudo-gradient (DiLoCo, arXiv:2311.08105)."""

    name: Literal["nesterov"] = "nesterov"
    lr: Annotated[float, Field(gt=0)] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9


class SgdOuter(Section):
    """Plain SGD on the pseudo-gradient; lr 1 is parameter averaging."""

    name: Literal["sgd"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 1.0


OuterConfig = Annotated[NesterovOuter | SgdOuter, Field(discriminator="name")]


class AllReduceConfig(Section):
    """Data-parallel baseline; `tuned` is all-to-all + all-gather, `naive` is gloo's own all-reduce."""

    name: Literal["allreduce"] = "allreduce"
    wire: Literal["fp32", "bf16", "fp16"] = "fp32"
    collective: Literal["tuned", "naive"] = "tuned"


class DiLoCoConfig(Section):
    """`local_steps` inner steps (H), then one outer step; defaults of arXiv:2311.08105 but H."""

    name: Literal["diloco"]
    local_steps: Count = 20
    compressor: CompressorConfig = CastCompressor()
    outer: OuterConfig = NesterovOuter()


class OverlapConfig(Section):
    """How many rounds late an exchange is applied, and what own progress in flight becomes."""

    delay_rounds: Annotated[int, Field(ge=0, le=1, strict=True)] = 1
    progress: Literal["keep", "discard"] = "keep"


class DiLoCoXConfig(Section):
    """One-step-delayed exchange of compressed pseudo-gradients (arXiv:2506.21263, a reconstruction)."""

    name: Literal["dilocox"]
    local_steps: Count = 20
    overlap: OverlapConfig = OverlapConfig()
    compressor: CompressorConfig = LowRankCompressor(name="lowrank-int4", adaptive=True)
    outer: OuterConfig = NesterovOuter()

    @model_validator(mode="after")
    def _check(self) -> DiLoCoXConfig:
        c = self.compressor
        if isinstance(c, LowRankCompressor) and c.adaptive and c.min_local_steps > self.local_steps:
            raise ValueError(
                f"compressor.min_local_steps: found {c.min_local_steps}, allowed at most local_steps "
                f"({self.local_steps})"
            )
        return self


MethodConfig = Annotated[AllReduceConfig | DiLoCoConfig | DiLoCoXConfig, Field(discriminator="name")]
