"""Reductions: fewer values and the bytes that say where they belong; whatever codec follows carries the values."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.compression.codec import Key, raw_bytes, slices
from trainer.compression.packing import (
    pack_bits,
    pack_indices,
    packed_index_bytes,
    unpack_bits,
    unpack_indices,
)
from trainer.model import named_generator

ROWS = 64
"""Chunks worked on at a time: 64 x 4096 values with their int64 indices are 3 MiB."""


class Reduction(ABC):
    """fp32 tensor -> (fp32 [kept(shape)], uint8 [side_nbytes(shape)]) -> fp32 tensor."""

    name: str

    @abstractmethod
    def kept(self, shape: Sequence[int]) -> int:
        """How many values remain of a tensor of this shape, which is never empty."""

    @abstractmethod
    def side_nbytes(self, shape: Sequence[int]) -> int:
        """Bytes beside the values."""

    @abstractmethod
    def reduce(self, tensor: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        """(values, side); values that are not finite are handed on, for the codec that follows to refuse."""

    @abstractmethod
    def expand(self, values: Tensor, side: Tensor, shape: torch.Size, key: Key) -> Tensor:
        """A tensor of `shape` that holds the values where they belong, and zeros elsewhere."""


class Chunks:
    """Rows of `chunk` values and a last, shorter one, each of which keeps a number of its values."""

    def __init__(self, numel: int, chunk: int, keep: int, keep_of_last: int) -> None:
        self.chunk, self.keep, self.keep_of_last = chunk, keep, keep_of_last
        self.full, self.rest = divmod(numel, chunk)

    @property
    def kept(self) -> int:
        """Values kept in all."""
        return self.full * self.keep + self.keep_of_last


class TopK(Reduction):
    """The `k` values of largest magnitude in each chunk (SparseLoCo, arXiv:2508.15706: 64 of 4096).

    Positions within a chunk travel as packed indices (8 bits up to a chunk of 256, else 12), or as one bit
    for each value of the chunk where that is shorter. A last, shorter chunk keeps min(k, its length).
    """

    name = "topk"

    def __init__(self, k: int, chunk: int) -> None:
        if not 1 <= k <= chunk <= 4096:
            raise ValueError(f"topk: found k {k} and chunk {chunk}, allowed 1 <= k <= chunk <= 4096")
        self.k, self.chunk = k, chunk
        self.index_bits = 8 if chunk <= 256 else 12
        self.as_bits = chunk < k * self.index_bits

    def _chunks(self, shape: Sequence[int]) -> Chunks:
        numel = math.prod(shape)
        return Chunks(numel, self.chunk, self.k, min(self.k, numel % self.chunk))

    def kept(self, shape: Sequence[int]) -> int:
        """k a chunk."""
        return self._chunks(shape).kept

    def side_nbytes(self, shape: Sequence[int]) -> int:
        """Packed indices, or one bit a value."""
        if self.as_bits:
            return -(-math.prod(shape) // 8)
        return packed_index_bytes(self.kept(shape), self.index_bits)

    def reduce(self, tensor: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        """See the base class; within a chunk values come in the order of their positions."""
        flat, chunks = tensor.reshape(-1), self._chunks(tensor.shape)
        positions = torch.empty(chunks.kept, dtype=torch.int16)
        values = torch.empty(chunks.kept)
        whole = flat[: chunks.full * self.chunk].view(chunks.full, self.chunk)
        split = chunks.full * self.k
        for rows in slices(chunks.full, ROWS):
            found = _largest(whole[rows], self.k)
            positions[:split].view(-1, self.k)[rows] = found
            torch.gather(whole[rows], 1, found, out=values[:split].view(-1, self.k)[rows])
        if chunks.rest:
            last = flat[chunks.full * self.chunk :].view(1, -1)
            found = _largest(last, chunks.keep_of_last)
            positions[split:] = found[0]
            values[split:] = last.gather(1, found)[0]
        if not self.as_bits:
            return values, pack_indices(positions, self.index_bits)
        mask = torch.zeros(flat.numel(), dtype=torch.bool)
        mask[self._absolute(positions, chunks)] = True
        return values, pack_bits(mask)

    def expand(self, values: Tensor, side: Tensor, shape: torch.Size, key: Key) -> Tensor:
        """See the base class."""
        chunks = self._chunks(shape)
        out = torch.zeros(math.prod(shape))
        if self.as_bits:
            return out.masked_scatter_(unpack_bits(side, out.numel()), values).view(shape)
        positions = unpack_indices(side, chunks.kept, self.index_bits)
        out[self._absolute(positions, chunks)] = values
        return out.view(shape)

    def _absolute(self, positions: Tensor, chunks: Chunks) -> Tensor:
        split = chunks.full * self.k
        starts = torch.arange(chunks.full) * self.chunk
        absolute = positions.long()
        absolute[:split].view(-1, self.k).add_(starts[:, None])
        absolute[split:] += chunks.full * self.chunk
        return absolute


def _largest(rows: Tensor, k: int) -> Tensor:
    """int64 [rows, k] positions of the largest magnitudes, ascending; NaN counts as largest."""
    return rows.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values


class RandomK(Reduction):
    """A `fraction` of each 4096 values, drawn from (seed, round, tensor): no index is sent, only the round.

    All replicas that are in the same round keep the same positions. With `unbiased` the kept values are
    divided by the share that is kept, so that the expectation over rounds is the input; without it, as
    error feedback wants it, they are sent as they are. Payload beside the values, 8 bytes: the round, and a
    digest of seed and tensor, so that nothing is ever put where it does not belong.
    """

    name = "randomk"
    chunk = 4096

    def __init__(self, fraction: float, seed: int, *, unbiased: bool = False) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"randomk: found fraction {fraction}, allowed above 0 and at most 1")
        self.fraction, self.seed, self.unbiased = fraction, seed, unbiased

    def _chunks(self, shape: Sequence[int]) -> Chunks:
        numel = math.prod(shape)
        keep, last = (math.ceil(self.fraction * n - 1e-9) for n in (self.chunk, numel % self.chunk))
        return Chunks(numel, self.chunk, keep, last)

    def kept(self, shape: Sequence[int]) -> int:
        """ceil(fraction x length) of each chunk."""
        return self._chunks(shape).kept

    def side_nbytes(self, shape: Sequence[int]) -> int:
        """The round and the digest, int32 each."""
        return 8

    def reduce(self, tensor: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        """See the base class."""
        flat, chunks = tensor.reshape(-1), self._chunks(tensor.shape)
        values = flat[self._positions(chunks, key)]
        if self.unbiased:
            self._scale(values, chunks)
        return values, raw_bytes(torch.tensor([key.round, self._digest(key)], dtype=torch.int32))

    def expand(self, values: Tensor, side: Tensor, shape: torch.Size, key: Key) -> Tensor:
        """See the base class; the round is the sender's, whatever `key` says.

        Raises:
            ValueError: the payload is of another tensor, or was drawn with another seed.
        """
        chunks = self._chunks(shape)
        number, digest = side.clone().view(torch.int32).tolist()
        if digest != self._digest(key):
            raise ValueError(f"randomk: {key.tensor}: found a payload of another tensor or seed")
        sender = Key(key.tensor, number)
        out = torch.zeros(math.prod(shape))
        out[self._positions(chunks, sender)] = values
        return out.view(shape)

    def _digest(self, key: Key) -> int:
        return zlib.crc32(f"{self.seed} {key.tensor}".encode()) >> 1

    def _scale(self, values: Tensor, chunks: Chunks) -> None:
        split = chunks.full * chunks.keep
        values[:split] *= self.chunk / chunks.keep
        if chunks.rest:
            values[split:] *= chunks.rest / chunks.keep_of_last

    def _positions(self, chunks: Chunks, key: Key) -> Tensor:
        generator = named_generator(self.seed, "random-k", key.tensor, key.round)
        kept = []
        for rows in slices(chunks.full, ROWS):
            draws = torch.rand(rows.stop - rows.start, self.chunk, generator=generator)
            start = torch.arange(rows.start, rows.stop)[:, None] * self.chunk
            kept.append((_largest(draws, chunks.keep) + start).flatten())
        if chunks.rest:
            draws = torch.rand(1, chunks.rest, generator=generator)
            kept.append(_largest(draws, chunks.keep_of_last)[0] + chunks.full * self.chunk)
        return torch.cat(kept)
