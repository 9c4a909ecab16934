"""Compressors as configuration: which codec, and what becomes of what was not sent.

`{name: int4}` is one codec; `{name: chain, of: [{name: topk, k: 64}, {name: int2}]}` applies several in
order: reductions (topk, randomk, dct; lowrank only first), then at most one that carries the values.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from trainer.config_base import Count, Section

Block = Annotated[int, Field(ge=8, multiple_of=8, strict=True)]


class Feedback(Section):
    """What was not sent is added to the next input, times `decay` (SparseLoCo, arXiv:2508.15706: 0.95)."""

    decay: Annotated[float, Field(gt=0, le=1)] = 1.0


class CastPart(Section):
    """Every value rounded to a floating-point type."""

    name: Literal["fp16", "bf16"]


class BlockPart(Section):
    """Block-scaled integers: one bf16 scale for each `block` values.

    `clip_sigma`: values beyond that many root mean squares of their tensor are limited to it first.
    """

    name: Literal["int8", "int4", "int2"]
    block: Block = 128
    clip_sigma: Annotated[float, Field(gt=0)] | None = None


class Fp4Part(Section):
    """Four-bit floats (E3M0): signed powers of two under one bf16 scale for each `block` values."""

    name: Literal["fp4"]
    block: Block = 128


class SignPart(Section):
    """One bit a value, times the mean magnitude of its block."""

    name: Literal["sign"]
    block: Block = 1024


class TopKPart(Section):
    """The `k` values of largest magnitude in each `chunk`."""

    name: Literal["topk"]
    k: Count = 64
    chunk: Annotated[int, Field(ge=1, le=4096, strict=True)] = 4096

    @model_validator(mode="after")
    def _check_k(self) -> TopKPart:
        if self.k > self.chunk:
            raise ValueError(f"k: found {self.k}, allowed at most chunk ({self.chunk})")
        return self


class RandomKPart(Section):
    """A random `fraction` of the values, the same on all replicas, whose positions need not be sent."""

    name: Literal["randomk"]
    fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    unbiased: bool = False


class DctPart(Section):
    """The `k` largest cosine coefficients of each block of `size` x `size` values of a matrix."""

    name: Literal["dct"]
    size: Annotated[int, Field(ge=2, le=64, strict=True)] = 64
    k: Count = 32


class LowRankOptions(Section):
    """Low-rank factors with an optionally adaptive rank.

    `energy` is the share of the pseudo-gradient's energy that the chosen rank should capture; `window`
    is the number of rounds averaged before the rank moves; the rank stays in [`min_rank`, `max_rank`]
    (default: from a quarter of `rank` up to `rank`) and H never falls below `min_local_steps`.
    """

    rank: Count = 32
    adaptive: bool = False
    min_rank: Count | None = None
    max_rank: Count | None = None
    energy: Annotated[float, Field(gt=0, le=1)] = 0.5
    window: Count = 3
    min_local_steps: Count = 1

    @model_validator(mode="after")
    def _check_rank(self) -> LowRankOptions:
        low, high = self.rank_bounds
        if not low <= self.rank <= high:
            raise ValueError(f"rank: found {self.rank}, allowed from min_rank {low} to max_rank {high}")
        return self

    @property
    def rank_bounds(self) -> tuple[int, int]:
        """(lowest, highest) rank that adaptation may choose."""
        low = self.min_rank or max(1, self.rank // 4)
        return low, self.max_rank or max(self.rank, low)


class LowRankPart(LowRankOptions):
    """Low-rank factors, carried by what follows in the chain."""

    name: Literal["lowrank"]


Part = Annotated[
    CastPart | BlockPart | Fp4Part | SignPart | TopKPart | RandomKPart | DctPart | LowRankPart,
    Field(discriminator="name"),
]


class CastCompressor(Section):
    """Every value rounded to a floating-point type on the wire; `none` sends fp32."""

    name: Literal["none", "fp16", "bf16"] = "none"
    error_feedback: bool | Feedback = False


class BlockCompressor(BlockPart):
    """`BlockPart` as the whole compressor."""

    error_feedback: bool | Feedback = True


class Fp4Compressor(Fp4Part):
    """`Fp4Part` as the whole compressor."""

    error_feedback: bool | Feedback = True


class SignCompressor(SignPart):
    """`SignPart` as the whole compressor."""

    error_feedback: bool | Feedback = True


class TopKCompressor(TopKPart):
    """`TopKPart` as the whole compressor, values in fp32."""

    error_feedback: bool | Feedback = True


class RandomKCompressor(RandomKPart):
    """`RandomKPart` as the whole compressor, values in fp32."""

    error_feedback: bool | Feedback = True


class DctCompressor(DctPart):
    """`DctPart` as the whole compressor, coefficients in fp32."""

    error_feedback: bool | Feedback = True


class LowRankCompressor(LowRankOptions):
    """Low-rank factors in fp32 (`lowrank`) or int4 with blocks of `block` values (`lowrank-int4`)."""

    name: Literal["lowrank", "lowrank-int4"]
    block: Block = 128
    error_feedback: bool | Feedback = True


class ChainCompressor(Section):
    """`of`: parts applied in order, each to the values that the one before it left."""

    name: Literal["chain"]
    of: Annotated[tuple[Part, ...], Field(min_length=1)]
    error_feedback: bool | Feedback = True

    @model_validator(mode="after")
    def _check_order(self) -> ChainCompressor:
        for position, part in enumerate(self.of):
            last = position == len(self.of) - 1
            if isinstance(part, CastPart | BlockPart | Fp4Part | SignPart) and not last:
                raise ValueError(
                    f"of: found {part.name} before {self.of[position + 1].name}, allowed only last"
                )
            if isinstance(part, LowRankPart) and position:
                raise ValueError(f"of: found lowrank after {self.of[position - 1].name}, allowed only first")
        return self


CompressorConfig = Annotated[
    CastCompressor
    | BlockCompressor
    | Fp4Compressor
    | SignCompressor
    | TopKCompressor
    | RandomKCompressor
    | DctCompressor
    | LowRankCompressor
    | ChainCompressor,
    Field(discriminator="name"),
]


def low_rank_options(config: CompressorConfig) -> LowRankOptions | None:
    """The low-rank part of a compressor, if it has one."""
    if isinstance(config, LowRankCompressor):
        return config
    if isinstance(config, ChainCompressor) and isinstance(config.of[0], LowRankPart):
        return config.of[0]
    return None


def feedback_decay(feedback: bool | Feedback) -> float | None:
    """The decay of the residual; None where there is no feedback."""
    if isinstance(feedback, Feedback):
        return feedback.decay
    return 1.0 if feedback else None
