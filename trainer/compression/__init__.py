"""How a pseudo-gradient becomes few bytes: quantisers of single tensors, averagers over replicas."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainer.compression.averagers import Averaged, Averager, ErrorFeedback, MeanAverager, QuantisedAverager
from trainer.compression.lowrank import LowRankAverager
from trainer.compression.quantisers import Quantiser, quantiser
from trainer.compressor_config import BlockCompressor, CastCompressor, LowRankCompressor

__all__ = ["Averaged", "Averager", "ErrorFeedback", "Quantiser", "build_averager", "quantiser"]

Shapes = Mapping[str, torch.Size]


def build_averager(
    config: CastCompressor | BlockCompressor | LowRankCompressor, shapes: Shapes, seed: int
) -> Averager:
    """The averager that a configuration asks for, for tensors of these names and shapes."""
    averager: Averager
    if isinstance(config, LowRankCompressor):
        factors = quantiser("int4" if config.name == "lowrank-int4" else "fp32", config.block)
        averager = LowRankAverager(shapes, factors, config.rank, seed)
    elif isinstance(config, BlockCompressor):
        averager = QuantisedAverager(shapes, quantiser(config.name, config.block))
    elif config.name == "none":
        return MeanAverager(shapes)  # nothing is lost, so there is no error to feed back
    else:
        averager = QuantisedAverager(shapes, quantiser(config.name))
    return ErrorFeedback(averager) if config.error_feedback else averager
