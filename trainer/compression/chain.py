"""A reduction followed by whatever carries the values that remain."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.compression.casts import Cast
from trainer.compression.codec import Codec, Key
from trainer.compression.sparse import Reduction


class Chain(Codec):
    """`reduction`, then `values`, which may be a chain itself. Payload: the reduction's side, then theirs."""

    def __init__(self, reduction: Reduction, values: Codec) -> None:
        self.reduction, self.values = reduction, values
        self.name = f"{reduction.name} > {values.name}"

    def _nbytes(self, shape: Sequence[int]) -> int:
        return self.reduction.side_nbytes(shape) + self.values.nbytes((self.reduction.kept(shape),))

    def _encode(self, tensor: Tensor, key: Key) -> Tensor:
        values, side = self.reduction.reduce(tensor, key)
        return torch.cat((side, self.values.encode(values, key)))

    def _decode(self, payload: Tensor, shape: torch.Size, key: Key) -> Tensor:
        side = self.reduction.side_nbytes(shape)
        values = self.values.decode(payload[side:], (self.reduction.kept(shape),), key)
        return self.reduction.expand(values, payload[:side], shape, key)


def chain(parts: Sequence[Reduction | Codec]) -> Codec:
    """The codec of these parts, applied in order; values travel in fp32 if the last is a reduction.

    Raises:
        ValueError: a codec that is not the last one.
    """
    *first, last = parts
    codec = last if isinstance(last, Codec) else Chain(last, Cast("fp32"))
    for part in reversed(first):
        if not isinstance(part, Reduction):
            raise ValueError(f"chain: found {part.name} before {codec.name}, allowed only as the last")
        codec = Chain(part, codec)
    return codec
