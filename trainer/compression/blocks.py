"""Block-scaled codes: every `block` values share one bf16 scale; integers of 8, 4 and 2 bits, fp4, sign.

Payload: the scales of all blocks, then the codes block by block. Within a block codes are packed in
planes: with p codes a byte, byte j holds the codes of values j, j + w, j + 2w, ... (w = block / p), the
first in the lowest bits. Packing and unpacking then work on contiguous halves or quarters of a block,
which the processor's vector units take whole. A last block that is not full is packed the same way
with its own, shorter w, and padded with zeros to a whole byte.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trainer.compression.codec import CACHED_VALUES, Codec, CodecError, Key, non_finite, raw_bytes, slices

LARGEST = 3e38
"""Beyond it a scale rounded up to bf16 could decode to more than fp32 holds (3.40e38)."""

SMALLEST = 2.0**-118
"""A block whose scale is below it is sent as zeros: its reciprocal and bf16's own precision end there."""


class BlockCodec(Codec):
    """Codes of `bits` bits under one scale a block.

    Subclasses say what the scale of a block is and how values become codes. With `clip_sigma` values
    are first limited to that many root mean squares of the whole tensor (INTELLECT-1, arXiv:2412.01152,
    limits at 6 standard deviations; pseudo-gradients have a mean of about zero).
    """

    bits: int

    def __init__(self, block: int, clip_sigma: float | None = None) -> None:
        if block < 8 or block % 8:
            raise ValueError(f"block: found {block}, allowed a multiple of 8")
        self.block, self.clip_sigma = block, clip_sigma

    def _nbytes(self, shape: Sequence[int]) -> int:
        numel = math.prod(shape)
        full, rest, _ = self._layout(numel)
        return 2 * self._blocks(numel) + full * self.block * self.bits // 8 + -(-rest * self.bits // 8)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _layout(self, numel: int) -> tuple[int, int, int]:
        """Full blocks, values in the last one, and their number padded to whole bytes."""
        full, rest = divmod(numel, self.block)
        return full, rest, -(-rest * self.bits // 8) * 8 // self.bits

    def _encode(self, tensor: Tensor, key: Key) -> Tensor:
        flat = tensor.reshape(-1)
        limit = self._limit(flat)
        payload = torch.empty(self._nbytes(flat.shape), dtype=torch.uint8)
        scales = torch.empty(self._blocks(flat.numel()), dtype=torch.bfloat16)
        full, rest, width = self._layout(flat.numel())
        last = torch.nn.functional.pad(flat[full * self.block :], (0, width - rest))
        for rows, values, packed in self._steps(flat, full, last, payload[2 * len(scales) :]):
            clipped = values if limit is None else values.clamp(-limit, limit)
            scratch = clipped.abs()
            top = scratch.amax(dim=1)
            worst = float(top.amax())
            if not worst <= LARGEST:
                if not math.isfinite(worst):
                    raise non_finite(worst, key)
                raise CodecError(f"{key.tensor} holds {worst:g}, beyond the range of {self.name}")
            count = self.block if rows.start < full else rest
            scale = self._scale(scratch, top, count)
            scale = scale.where(scale >= SMALLEST, 0).bfloat16()
            scales[rows] = scale
            inverse = scale.float().reciprocal_().nan_to_num_(posinf=0.0)[:, None]
            self._to_codes(torch.mul(clipped, inverse, out=scratch), packed)
        payload[: 2 * len(scales)] = raw_bytes(scales)
        return payload

    def _decode(self, payload: Tensor, shape: torch.Size, key: Key) -> Tensor:
        numel = math.prod(shape)
        split = 2 * self._blocks(numel)
        scales = payload[:split].clone().view(torch.bfloat16).float()[:, None]
        full, _, width = self._layout(numel)
        values = torch.empty(full * self.block + width)
        for rows, part, packed in self._steps(values, full, values[full * self.block :], payload[split:]):
            self._from_codes(packed, part, scales[rows])
        return values[:numel].view(shape)

    def _steps(
        self, flat: Tensor, full: int, last: Tensor, codes: Tensor
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, values [rows, width], packed codes [rows, width bits / 8]), cache-sized; `last` at the end."""
        values = flat[: full * self.block].view(full, self.block)
        row_bytes = self.block * self.bits // 8
        packed = codes[: full * row_bytes].view(full, row_bytes)
        for rows in slices(full, max(1, CACHED_VALUES // self.block)):
            yield rows, values[rows], packed[rows]
        if last.numel():
            yield slice(full, full + 1), last.view(1, -1), codes[full * row_bytes :].view(1, -1)

    def _limit(self, flat: Tensor) -> float | None:
        if self.clip_sigma is None:
            return None
        rms = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) / math.sqrt(flat.numel())
        return self.clip_sigma * rms if math.isfinite(rms) else None

    @abstractmethod
    def _scale(self, magnitudes: Tensor, top: Tensor, count: int) -> Tensor:
        """fp32 [b] scale of each block, rounded to bf16 next: |values| [b, w], maxima [b], values a block."""

    @abstractmethod
    def _to_codes(self, scaled: Tensor, packed: Tensor) -> None:
        """Write the codes of values / scale [b, w], which may be overwritten, to uint8 [b, w bits / 8]."""

    @abstractmethod
    def _from_codes(self, packed: Tensor, values: Tensor, scale: Tensor) -> None:
        """The inverse, into fp32 [b, w]; `scale` is fp32 [b, 1]."""


def rounded_up(scale: Tensor) -> Tensor:
    """The nearest bf16 value that is not smaller; at most 1/128 larger. Positive finite fp32 only."""
    bits = scale.view(torch.int32) + 0xFFFF
    return bits.bitwise_and_(-0x10000).view(torch.float32)


def planes(matrix: Tensor, count: int) -> Sequence[Tensor]:
    """[b, w] as `count` contiguous column ranges."""
    return matrix.chunk(count, dim=1)


def pack_planes(codes: Tensor, bits: int, packed: Tensor) -> None:
    """Whole numbers 0 .. 2^bits - 1 held as fp32 [b, w] -> uint8 [b, w bits / 8]."""
    first, *others = planes(codes, 8 // bits)
    for position, plane in enumerate(others, start=1):
        first.add_(plane, alpha=2 ** (bits * position))
    packed.copy_(first)


def unpack_plane(packed: Tensor, bits: int, position: int) -> Tensor:
    """uint8 codes of one plane."""
    codes: Tensor = (packed >> (bits * position)) & (2**bits - 1)
    return codes


class Int8(BlockCodec):
    """-127 .. 127 times the block's largest magnitude / 127; error at most half a step of that."""

    name, bits = "int8", 8

    def _scale(self, magnitudes: Tensor, top: Tensor, count: int) -> Tensor:
        return rounded_up(top / 127)

    def _to_codes(self, scaled: Tensor, packed: Tensor) -> None:
        packed.view(torch.int8).copy_(scaled.round_())

    def _from_codes(self, packed: Tensor, values: Tensor, scale: Tensor) -> None:
        torch.mul(packed.view(torch.int8), scale, out=values)


class Int4(BlockCodec):
    """-7 .. 7 times the block's largest magnitude / 7; error at most half a step of that.

    A byte is low + 16 high as a signed number. As |low| <= 7, high = round(byte / 16): no bit is masked.
    """

    name, bits = "int4", 4

    def _scale(self, magnitudes: Tensor, top: Tensor, count: int) -> Tensor:
        return rounded_up(top / 7)

    def _to_codes(self, scaled: Tensor, packed: Tensor) -> None:
        low, high = planes(scaled.round_(), 2)
        packed.view(torch.int8).copy_(low.add_(high, alpha=16))

    def _from_codes(self, packed: Tensor, values: Tensor, scale: Tensor) -> None:
        both = packed.view(torch.int8).float()
        high = (both * 0.0625).round_()
        low = both.add_(high, alpha=-16)
        first, second = planes(values, 2)
        torch.mul(low, scale, out=first)
        torch.mul(high, scale, out=second)


class Int2(BlockCodec):
    """-3, -1, 1 or 3 times a quarter of the block's largest magnitude; error at most that quarter.

    Four levels, none of them zero (a block of zeros has scale zero): for the values that top-k leaves,
    and for bell-shaped ones too, the error is smaller than with -1, 0, 1, which wastes a code.
    """

    name, bits = "int2", 2

    def _scale(self, magnitudes: Tensor, top: Tensor, count: int) -> Tensor:
        return rounded_up(top / 4)

    def _to_codes(self, scaled: Tensor, packed: Tensor) -> None:
        pack_planes(scaled.mul_(0.5).add_(2).floor_().clamp_(0, 3), 2, packed)

    def _from_codes(self, packed: Tensor, values: Tensor, scale: Tensor) -> None:
        for position, plane in enumerate(planes(values, 4)):
            codes = unpack_plane(packed, 2, position).float()
            torch.mul(codes.mul_(2).sub_(3), scale, out=plane)


class Fp4(BlockCodec):
    """E3M0 (Streaming DiLoCo, arXiv:2501.18512): a sign, and zero or 2^-6 .. 2^0 times the scale.

    The scale is the block's largest magnitude, rounded down to bf16. Nearest level; error at most a third
    of the value, or half the smallest level. Reconstruction: the source does not say how blocks are scaled.
    """

    name, bits = "fp4", 4

    def _scale(self, magnitudes: Tensor, top: Tensor, count: int) -> Tensor:
        return top.view(torch.int32).bitwise_and(-0x10000).view(torch.float32)

    def _to_codes(self, scaled: Tensor, packed: Tensor) -> None:
        negative = scaled < 0
        size = scaled.abs_()
        some = size >= 2.0**-7
        # adding half of the mantissa's range carries into the exponent from 1.5 upwards: nearest power of two
        exponent = (size.view(torch.int32) + 0x400000) >> 23
        codes = (exponent - (127 - 7)).clamp_(1, 7).mul_(some).add_(negative, alpha=8)
        pack_planes(codes.float(), 4, packed)

    def _from_codes(self, packed: Tensor, values: Tensor, scale: Tensor) -> None:
        for position, plane in enumerate(planes(values, 2)):
            code = unpack_plane(packed, 4, position).to(torch.int32)
            size = code & 7
            exponent = (size + (127 - 7)) * (size > 0)
            level = ((exponent << 23) | (code >> 3 << 31)).view(torch.float32)
            torch.mul(level, scale, out=plane)


class Sign(BlockCodec):
    """One bit a value, times the mean magnitude of its block (1-bit SGD with blocks); zero counts as plus."""

    name, bits = "sign", 1

    def _scale(self, magnitudes: Tensor, top: Tensor, count: int) -> Tensor:
        return (magnitudes.sum(dim=1, dtype=torch.float64) / count).float()

    def _to_codes(self, scaled: Tensor, packed: Tensor) -> None:
        pack_planes((scaled >= 0).float(), 1, packed)

    def _from_codes(self, packed: Tensor, values: Tensor, scale: Tensor) -> None:
        for position, plane in enumerate(planes(values, 8)):
            torch.mul(unpack_plane(packed, 1, position).float().mul_(2).sub_(1), scale, out=plane)
