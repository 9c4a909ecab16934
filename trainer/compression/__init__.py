"""How a pseudo-gradient becomes few bytes: codecs of single tensors, averagers over replicas."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer.compression.averagers import Averaged, Averager, CodecAverager, MeanAverager
from trainer.compression.blocks import Int4
from trainer.compression.casts import Cast
from trainer.compression.chain import chain
from trainer.compression.codec import Codec, CodecError, Key
from trainer.compression.codecs import build_codec, build_part
from trainer.compression.feedback import ErrorFeedback
from trainer.compression.lowrank import LowRankAverager
from trainer.compressor_config import (
    ChainCompressor,
    CompressorConfig,
    LowRankCompressor,
    feedback_decay,
    low_rank_options,
)

__all__ = [
    "Averaged",
    "Averager",
    "Codec",
    "CodecError",
    "ErrorFeedback",
    "Key",
    "build_averager",
    "build_codec",
]

Shapes = Mapping[str, torch.Size]


def build_averager(config: CompressorConfig, shapes: Shapes, seed: int) -> Averager:
    """The averager that a configuration asks for, for tensors of these names and shapes."""
    averager: Averager
    low_rank = low_rank_options(config)
    if config.name == "none":
        return MeanAverager(shapes)  # nothing is lost, so there is no error to feed back
    if low_rank is not None:
        averager = LowRankAverager(shapes, _factor_codec(config, seed), low_rank.rank, seed)
    else:
        averager = CodecAverager(shapes, build_codec(config, seed))
    decay = feedback_decay(config.error_feedback)
    return averager if decay is None else ErrorFeedback(averager, decay)


def _factor_codec(config: CompressorConfig, seed: int) -> Codec:
    """What carries low-rank factors, and the tensors that have none."""
    if isinstance(config, ChainCompressor) and len(config.of) > 1:
        return chain([build_part(part, seed) for part in config.of[1:]])
    if isinstance(config, LowRankCompressor) and config.name == "lowrank-int4":
        return Int4(config.block)
    return Cast("fp32")
