"""How replicas agree, as configuration: methods and outer optimisers; each has its own keys only."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trainer.compressor_config import CastCompressor, CompressorConfig, low_rank_options
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
    """Data-parallel baseline; `tuned` is this trainer's own exchange, `naive` gloo's all-reduce.

    Exchange and inner step happen every `accumulate` steps, on the mean of their gradients. `overlap`
    sends buckets of `bucket_mb` MiB (25 with overlap, otherwise one for all) while backward goes on.
    """

    name: Literal["allreduce"] = "allreduce"
    wire: Literal["fp32", "bf16", "fp16"] = "fp32"
    collective: Literal["tuned", "naive"] = "tuned"
    accumulate: Count = 1
    overlap: bool = False
    bucket_mb: Annotated[float, Field(gt=0)] | None = None


class LocalUpdateConfig(MethodSection):
    """Local steps, then one exchange and one outer step; what all such methods may vary."""

    local_steps: Count = 20
    overlap: OverlapConfig = OverlapConfig()
    compressor: CompressorConfig = CastCompressor()
    outer: OuterConfig = NesterovOuter()

    @model_validator(mode="after")
    def _check(self) -> Self:
        c = low_rank_options(self.compressor)
        if c is not None and c.adaptive and c.min_local_steps > self.local_steps:
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
class Intellect1Config(LocalUpdateConfig):
    """DiLoCo with pseudo-gradients in int8 (arXiv:2412.01152)."""

    name: Literal["intellect1"]


@published
class SparseLoCoConfig(LocalUpdateConfig):
    """Few values of the pseudo-gradient in two bits, with decaying error feedback (arXiv:2508.15706)."""

    name: Literal["sparse_loco"]


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


@published
class StreamingDiLoCoConfig(MethodSection):
    """Fragments of `fragment_layers` layers, one at a time, `overlap_steps` (tau) late (arXiv:2501.18512).

    `merge_alpha`: weight of the local weights when a fragment's outer ones arrive.
    """

    name: Literal["streaming_diloco"]
    local_steps: Count = 30
    fragment_layers: Count = 3
    overlap_steps: Count = 1
    merge_alpha: Annotated[float, Field(ge=0, le=1)] = 0.5
    compressor: CompressorConfig = CastCompressor()
    outer: OuterConfig = NesterovOuter()

    def fragments(self, layers: int) -> int:
        """How many fragments a model of so many layers has."""
        return -(-layers // self.fragment_layers)

    def check_run(self, layers: int, inner: str) -> None:
        """Every fragment has a step of its own to start at, and is over before the next one starts."""
        fragments = self.fragments(layers)
        if self.local_steps < fragments:
            raise ValueError(
                f"method.local_steps: found {self.local_steps}, allowed at least the number of fragments "
                f"({fragments}: {layers} layers, {self.fragment_layers} in each)"
            )
        if self.overlap_steps > self.local_steps // fragments:
            raise ValueError(
                f"method.overlap_steps: found {self.overlap_steps}, allowed at most local_steps // fragments "
                f"({self.local_steps // fragments})"
            )


@published
class CocktailSgdConfig(MethodSection):
    """Compressed differences of local and shared weights, `delay_rounds` late (CocktailSGD, ICML 2023)."""

    name: Literal["cocktail_sgd"]
    local_steps: Count = 1
    delay_rounds: Annotated[int, Field(ge=0, le=1, strict=True)] = 1
    compressor: CompressorConfig = CastCompressor()
    outer: OuterConfig = SgdOuter()


@published
class DeMoConfig(MethodSection):
    """The fast part of the momentum, and its sign (arXiv:2411.19870); needs `train.inner: sgd`."""

    name: Literal["demo"]
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.999
    compressor: CompressorConfig = CastCompressor()

    def check_run(self, layers: int, inner: str) -> None:
        """The sign of the momentum is the step: an adaptive optimiser would normalise it again."""
        if inner != "sgd":
            raise ValueError(
                f"train.inner: found {inner!r}, allowed sgd with method demo, whose momentum and sign take "
                f"the place of an optimiser"
            )


@published
class PowerSgdConfig(MethodSection):
    """torch's PowerSGD hook (arXiv:1905.13727); dense until step `start_iter`."""

    name: Literal["powersgd"]
    rank: Count = 4
    start_iter: Annotated[int, Field(ge=2, strict=True)] = 10
    min_compression_rate: Annotated[float, Field(gt=0)] = 2.0
    error_feedback: bool = True


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
    | Intellect1Config
    | StreamingDiLoCoConfig
    | EagerDiLoCoConfig
    | DiLoCoXConfig
    | CocktailSgdConfig
    | SparseLoCoConfig
    | DeMoConfig
    | PowerSgdConfig
    | NoLoCoConfig
    | CustomConfig,
    Field(discriminator="name"),
]
