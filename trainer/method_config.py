"""How replicas agree, as configuration: methods and outer optimisers; each has its own keys only."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.compressor_config import CastCompressor, CompressorConfig, LowRankCompressor
from trainer.config_base import Count, Section


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
