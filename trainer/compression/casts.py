"""Every value rounded to a narrower floating-point type."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.collectives import WIRE_DTYPES
from trainer.compression.codec import Codec, CodecError, Key, raw_bytes, refuse_non_finite


class Cast(Codec):
    """Every value rounded to fp32 (exact), bf16 or fp16."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = WIRE_DTYPES[name]

    def _nbytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def _encode(self, tensor: Tensor, key: Key) -> Tensor:
        flat = tensor.reshape(-1)
        refuse_non_finite(flat, key)
        cast = flat.to(self.dtype, copy=True)
        if self.dtype != torch.float32 and not torch.isfinite(cast).all():
            largest = float(flat[~torch.isfinite(cast)][0])
            raise CodecError(f"{key.tensor} holds {largest:g}, beyond the range of {self.name}")
        return raw_bytes(cast)

    def _decode(self, payload: Tensor, shape: torch.Size, key: Key) -> Tensor:
        # a slice of a larger payload may not be aligned for the type
        return payload.clone().view(self.dtype).float().view(shape)
