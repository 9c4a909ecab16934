"""Bits and short indices, packed."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_bits(mask: Tensor) -> Tensor:
    """bool [n] -> uint8 [ceil(n / 8)], eight neighbours a byte, the first in the lowest bit."""
    padded = torch.nn.functional.pad(mask.view(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    packed = padded[:, 0].clone()
    for position in range(1, 8):
        packed |= padded[:, position] << position
    return packed


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """The inverse."""
    bits = torch.empty(packed.numel(), 8, dtype=torch.bool)
    for position in range(8):
        bits[:, position] = (packed & (1 << position)) != 0
    return bits.flatten()[:numel]


def packed_index_bytes(count: int, bits: int) -> int:
    """Length of `count` packed indices of 8 or 12 bits."""
    return -(-count * bits // 8)


def pack_indices(indices: Tensor, bits: int) -> Tensor:
    """int16 [n] -> uint8 [packed_index_bytes]; 12 bits: two in three bytes, low bits first.

    >>> pack_indices(torch.tensor([0xABC, 0x123], dtype=torch.int16), 12).tolist() == [0xBC, 0x3A, 0x12]
    True
    """
    if bits == 8:
        return indices.to(torch.uint8)
    first, second = torch.nn.functional.pad(indices, (0, indices.numel() % 2)).view(-1, 2).unbind(1)
    triples = torch.stack((first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4), dim=1)
    return triples.to(torch.uint8).flatten()[: packed_index_bytes(indices.numel(), bits)].contiguous()


def unpack_indices(packed: Tensor, count: int, bits: int) -> Tensor:
    """The inverse, as int16 [count]."""
    if bits == 8:
        return packed.to(torch.int16)
    triples = torch.nn.functional.pad(packed, (0, -packed.numel() % 3)).to(torch.int16).view(-1, 3)
    low, middle, high = triples.unbind(1)
    pairs = torch.stack((low | ((middle & 0xF) << 8), (middle >> 4) | (high << 4)), dim=1)
    return pairs.flatten()[:count]
