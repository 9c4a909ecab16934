"""How replicas agree, as configuration: methods and outer optimisers; each has its own keys only."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trainer.compressor_config import CastCompressor, CompressorConfig, LowRankCompressor
from trainer.config_base import Count, Section
from trainer.presets import MethodSection, published


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


class OverlapConfig(Section):
    """How many rounds late an exchange is applied, and what own progress in flight becomes.

    `keep`: re-applied on top of what everybody shares; `discard`: dropped until its average arrives;
    `eager`: used at once in place of the average, and replaced by it when it arrives.
    """

    delay_rounds: Annotated[int, Field(ge=0, le=1, strict=True)] = 0
    progress: Literal["keep", "discard", "eager"] = "keep"


class AllReduceConfig(MethodSection):
    """Data-parallel baseline; `tuned` is all-to-all + all-gather, `naive` is gloo's own all-reduce."""

    name: Literal["allreduce"] = "allreduce"
    wire: Literal["fp32", "bf16", "fp16"] = "fp32"
    collective: Literal["tuned", "naive"] = "tuned"


class LocalUpdateConfig(MethodSection):
    """Local steps, then one exchange and one outer step; what all such methods may vary."""

    local_steps: Count = 20
    overlap: OverlapConfig = OverlapConfig()
    compressor: CompressorConfig = CastCompressor()
    outer: OuterConfig = NesterovOuter()

    @model_validator(mode="after")
    def _check(self) -> Self:
        c = self.compressor
        if isinstance(c, LowRankCompressor) and c.adaptive and c.min_local_steps > self.local_steps:
            raise ValueError(
                f"compressor.min_local_steps: found {c.min_local_steps}, allowed at most local_steps "
                f"({self.local_steps})"
            )
        return self


@published
class LocalSgdConfig(LocalUpdateConfig):
    """Plain averaging of weights every `local_steps` steps (arXiv:1805.09767)."""

    name: Literal["local_sgd"]


@published
class DiLoCoConfig(LocalUpdateConfig):
    """`local_steps` inner steps (H), then one outer step with Nesterov momentum (arXiv:2311.08105)."""

    name: Literal["diloco"]


@published
class OpenDiLoCoConfig(LocalUpdateConfig):
    """DiLoCo with pseudo-gradients in fp16 (arXiv:2407.07852)."""

    name: Literal["opendiloco"]


@published
class EagerDiLoCoConfig(LocalUpdateConfig):
    """DiLoCo one round late, the own part of the average used at once (arXiv:2502.12996)."""

    name: Literal["eager_diloco"]


@published
class DiLoCoXConfig(LocalUpdateConfig):
    """One-step-delayed exchange of compressed pseudo-gradients (arXiv:2506.21263, a reconstruction)."""

    name: Literal["dilocox"]


@published
class NoLoCoConfig(MethodSection):
    """Gossip in pairs; `gossip` is the weight of the pull towards the partner (arXiv:2506.10911)."""

    name: Literal["noloco"]
    local_steps: Count = 50
    compressor: CompressorConfig = CastCompressor()
    lr: Annotated[float, Field(gt=0)] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    gossip: Annotated[float, Field(gt=0)] = 1.0


class CustomConfig(MethodSection):
    """A method from your own module: `path: my_package.my_module:MyMethod`, checked by its `Options`."""

    name: Literal["custom"]
    path: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _find(self) -> Self:
        from trainer.methods.custom import find_custom  # noqa: PLC0415 - needs torch, as nothing else here does

        find_custom(self)
        return self


MethodConfig = Annotated[
    AllReduceConfig
    | LocalSgdConfig
    | DiLoCoConfig
    | OpenDiLoCoConfig
    | EagerDiLoCoConfig
    | DiLoCoXConfig
    | NoLoCoConfig
    | CustomConfig,
    Field(discriminator="name"),
]
