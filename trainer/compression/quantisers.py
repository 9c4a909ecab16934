"""Element-wise quantisers: a tensor of any shape to a row of bytes of a length known beforehand."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.collectives import WIRE_DTYPES


class QuantisationError(ValueError):
    """A tensor holds a value that cannot be sent; the message names the tensor."""


class Quantiser(ABC):
    """fp32 tensor -> uint8 [nbytes] -> fp32 tensor; the bytes say nothing of the shape."""

    name: str

    @abstractmethod
    def nbytes(self, shape: Sequence[int]) -> int:
        """Exact length of the payload of a tensor of this shape, scales included."""

    @abstractmethod
    def _encode(self, flat: Tensor, name: str) -> Tensor: ...

    @abstractmethod
    def _decode(self, payload: Tensor, numel: int) -> Tensor: ...

    def compress(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        """uint8 [nbytes(tensor.shape)].

        Raises:
            QuantisationError: an infinity or NaN, or a value beyond the range of the wire's type.
        """
        flat = tensor.detach().reshape(-1).float()
        if not torch.isfinite(flat).all():
            raise QuantisationError(f"{name} holds {_first_bad(flat)}: only finite values can be sent")
        return self._encode(flat, name) if flat.numel() else torch.empty(0, dtype=torch.uint8)

    def decompress(self, payload: Tensor, shape: Sequence[int]) -> Tensor:
        """fp32 tensor of this shape.

        Raises:
            ValueError: the payload's length does not fit the shape.
        """
        if payload.numel() != self.nbytes(shape):
            raise ValueError(
                f"{self.name}: found {payload.numel()} bytes for shape {tuple(shape)}, "
                f"allowed exactly {self.nbytes(shape)}"
            )
        numel = math.prod(shape)
        flat = self._decode(payload, numel) if numel else torch.empty(0)
        return flat.reshape(tuple(shape))


def _first_bad(flat: Tensor) -> float:
    return float(flat[~torch.isfinite(flat)][0])


class Cast(Quantiser):
    """Every value rounded to fp32, bf16 or fp16."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dtype = WIRE_DTYPES[name]

    def nbytes(self, shape: Sequence[int]) -> int:
        """Values times the width of the type."""
        return math.prod(shape) * self.dtype.itemsize

    def _encode(self, flat: Tensor, name: str) -> Tensor:
        cast = flat.to(self.dtype)
        if not torch.isfinite(cast).all():
            raise QuantisationError(f"{name} holds a value beyond the range of {self.name}")
        return cast.contiguous().view(torch.uint8).clone()

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        # a slice of a larger payload may not be aligned for the type
        return payload.clone().view(self.dtype).float()


class BlockInteger(Quantiser):
    """Signed integers of 8 or 4 bits, scaled by the largest magnitude of each block of values.

    Payload: the tensor's largest magnitude (fp32); per block its own relative to that (fp16, so that
    tensors of any magnitude keep their precision); then codes. int4 packs two values a byte, low half
    first; an odd last value leaves the high half at zero. Codes are symmetric: +-127 or +-7.
    """

    def __init__(self, bits: int, block: int) -> None:
        if bits not in (4, 8):
            raise ValueError(f"bits: found {bits}, allowed 4 or 8")
        self.name = f"int{bits}"
        self.bits, self.block = bits, block
        self.top = 2 ** (bits - 1) - 1

    def nbytes(self, shape: Sequence[int]) -> int:
        """4 + 2 a block + `bits` a value, rounded up; 0 for an empty tensor."""
        numel = math.prod(shape)
        return 4 + 2 * self._blocks(numel) + -(-numel * self.bits // 8) if numel else 0

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _encode(self, flat: Tensor, name: str) -> Tensor:
        blocks = self._in_blocks(flat)
        block_top = blocks.abs().amax(dim=1)
        largest = block_top.max()
        relative = (block_top / largest.clamp_min(torch.finfo(torch.float32).tiny)).half()
        scale = self._scale(relative, largest)[:, None]
        # where the scale is zero so are the values, up to 2^-25 of the largest
        codes = (blocks / torch.where(scale > 0, scale, torch.inf)).round_().clamp_(-self.top, self.top)
        codes = codes.to(torch.int8).flatten()[: flat.numel()]
        return torch.cat(
            (largest.reshape(1).view(torch.uint8), relative.view(torch.uint8), self._pack(codes))
        )

    def _decode(self, payload: Tensor, numel: int) -> Tensor:
        blocks = self._blocks(numel)
        largest = payload[:4].clone().view(torch.float32)[0]
        relative = payload[4 : 4 + 2 * blocks].clone().view(torch.float16)
        codes = self._unpack(payload[4 + 2 * blocks :], numel)
        scale = self._scale(relative, largest)
        values = self._in_blocks(codes.float()) * scale[:, None]
        return values.flatten().narrow(0, 0, numel)

    def _scale(self, relative: Tensor, largest: Tensor) -> Tensor:
        return relative.float().mul(largest / self.top)

    def _in_blocks(self, flat: Tensor) -> Tensor:
        padding = self._blocks(flat.numel()) * self.block - flat.numel()
        return torch.nn.functional.pad(flat, (0, padding)).view(-1, self.block)

    def _pack(self, codes: Tensor) -> Tensor:
        if self.bits == 8:
            return codes.view(torch.uint8)
        nibbles = torch.nn.functional.pad(codes.view(torch.uint8) & 0xF, (0, codes.numel() % 2))
        packed: Tensor = nibbles[0::2] | (nibbles[1::2] << 4)
        return packed

    def _unpack(self, packed: Tensor, numel: int) -> Tensor:
        if self.bits == 8:
            return packed.view(torch.int8)
        nibbles = torch.stack((packed & 0xF, packed >> 4), dim=1).flatten()[:numel]
        signed: Tensor = (nibbles ^ 8).to(torch.int8) - 8  # sign-extend four bits
        return signed


def quantiser(name: str, block: int = 128) -> Quantiser:
    """fp32, fp16, bf16, int8 or int4; `block` is for the integers.

    Raises:
        ValueError: another name.
    """
    if name in WIRE_DTYPES:
        return Cast(name)
    if name in ("int8", "int4"):
        return BlockInteger(int(name.removeprefix("int")), block)
    raise ValueError(f"quantiser: found {name!r}, allowed {', '.join(WIRE_DTYPES)}, int8, int4")
