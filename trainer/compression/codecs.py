"""From configuration to codec."""

from __future__ import annotations

from trainer.compression.blocks import BlockCodec, Fp4, Int2, Int4, Int8, Sign
from trainer.compression.casts import Cast
from trainer.compression.chain import chain
from trainer.compression.codec import Codec
from trainer.compression.dct import DctTopK
from trainer.compression.sparse import RandomK, Reduction, TopK
from trainer.compressor_config import (
    BlockPart,
    CastCompressor,
    CastPart,
    ChainCompressor,
    CompressorConfig,
    DctPart,
    Fp4Part,
    Part,
    RandomKPart,
    SignPart,
    TopKPart,
)

INTEGERS: dict[str, type[BlockCodec]] = {"int8": Int8, "int4": Int4, "int2": Int2}


def build_codec(config: CompressorConfig, seed: int) -> Codec:
    """The codec of a compressor without low-rank factors; `seed` is for random-k.

    Raises:
        ValueError: the compressor has low-rank factors, which take two exchanges and are no codec.
    """
    if isinstance(config, ChainCompressor):
        return chain([build_part(part, seed) for part in config.of])
    return chain([build_part(config, seed)])


def build_part(part: Part | CompressorConfig, seed: int) -> Codec | Reduction:
    """One element of a chain."""
    built: Codec | Reduction
    if isinstance(part, CastPart | CastCompressor):
        built = Cast("fp32" if part.name == "none" else part.name)
    elif isinstance(part, BlockPart):
        built = INTEGERS[part.name](part.block, part.clip_sigma)
    elif isinstance(part, Fp4Part):
        built = Fp4(part.block)
    elif isinstance(part, SignPart):
        built = Sign(part.block)
    elif isinstance(part, TopKPart):
        built = TopK(part.k, part.chunk)
    elif isinstance(part, RandomKPart):
        built = RandomK(part.fraction, seed, unbiased=part.unbiased)
    elif isinstance(part, DctPart):
        built = DctTopK(part.size, part.k)
    else:
        raise ValueError(f"{part.name}: not a codec of single tensors")
    return built
