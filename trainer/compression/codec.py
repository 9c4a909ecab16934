"""What a codec is: a tensor of any shape to a row of bytes of a length known beforehand, and back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CACHED_VALUES = 65536
"""Values worked on at a time: 256 KiB of fp32, so that a chain of in-place operations stays in a core's L2."""


class CodecError(ValueError):
    """A tensor holds a value that cannot be sent; the message names the tensor."""


@dataclass(frozen=True)
class Key:
    """Whose bytes these are: the tensor's name and the round. Codecs that draw at random draw from it."""

    tensor: str
    round: int = 0


UNNAMED = Key("tensor")


class Codec(ABC):
    """fp32 tensor -> uint8 [nbytes(shape)] -> fp32 tensor; pure, and the bytes say nothing of the shape.

    Decoding only copies, shifts and multiplies: the same bytes become the same bits on every replica.
    """

    name: str

    def nbytes(self, shape: Sequence[int]) -> int:
        """Exact length of the payload of a tensor of this shape, scales and indices included."""
        return self._nbytes(shape) if math.prod(shape) else 0

    def encode(self, tensor: Tensor, key: Key = UNNAMED) -> Tensor:
        """uint8 [nbytes(tensor.shape)]; nothing for an empty tensor.

        Raises:
            CodecError: an infinity or NaN, or a value beyond what this codec can carry.
        """
        if tensor.numel() == 0:
            return torch.empty(0, dtype=torch.uint8)
        return self._encode(tensor.detach().float().contiguous(), key)

    def decode(self, payload: Tensor, shape: Sequence[int], key: Key = UNNAMED) -> Tensor:
        """fp32 tensor of this shape, new memory; `payload` may lie at any offset of a larger one.

        Raises:
            ValueError: the payload's length does not fit the shape.
        """
        if payload.numel() != self.nbytes(shape):
            raise ValueError(
                f"{self.name}: found {payload.numel()} bytes for shape {tuple(shape)}, "
                f"allowed exactly {self.nbytes(shape)}"
            )
        if math.prod(shape) == 0:
            return torch.zeros(tuple(shape))
        return self._decode(payload, torch.Size(shape), key)

    @abstractmethod
    def _nbytes(self, shape: Sequence[int]) -> int: ...

    @abstractmethod
    def _encode(self, tensor: Tensor, key: Key) -> Tensor: ...

    @abstractmethod
    def _decode(self, payload: Tensor, shape: torch.Size, key: Key) -> Tensor: ...


def slices(total: int, step: int) -> Iterator[slice]:
    """[0, step), [step, 2 step), ... up to `total`."""
    return (slice(start, min(start + step, total)) for start in range(0, total, step))


def refuse_non_finite(flat: Tensor, key: Key) -> None:
    """Refuse infinities and NaN in fp32 [n].

    Raises:
        CodecError: names the tensor and the value.
    """
    for part in slices(flat.numel(), CACHED_VALUES):
        low, high = float(flat[part].amin()), float(flat[part].amax())  # NaN wins both
        if not (math.isfinite(low) and math.isfinite(high)):
            raise non_finite(high if math.isfinite(low) else low, key)


def non_finite(value: float, key: Key) -> CodecError:
    """The refusal of an infinity or NaN."""
    return CodecError(f"{key.tensor} holds {value}: only finite values can be sent")


def raw_bytes(tensor: Tensor) -> Tensor:
    """uint8 view of a tensor's memory."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
