"""The largest coefficients of a discrete cosine transform by blocks (DeMo, arXiv:2411.19870)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.compression.codec import Key
from trainer.compression.sparse import Reduction, TopK


class DctTopK(Reduction):
    """Orthonormal DCT-II of `size` x `size` blocks of a matrix, `k` coefficients kept of each block.

    Tensors that are not matrices are cut into rows of `size` values instead. A side shorter than `size` is
    its own block; a side that `size` does not divide is padded with zeros. As the transform is orthonormal,
    what is not sent has the same norm in both spaces. Reconstruction where DeMo's text is silent: its
    code takes the largest divisor instead of padding; k is that of a block, matrix or row, as there.
    """

    name = "dct"

    def __init__(self, size: int, k: int) -> None:
        if not 2 <= size <= 64 or k < 1:
            raise ValueError(f"dct: found size {size} and k {k}, allowed a size of 2 to 64 and k >= 1")
        self.size, self.k = size, k

    def kept(self, shape: Sequence[int]) -> int:
        """min(k, block) of each block."""
        return self._top(shape).kept(self._blocked(shape))

    def side_nbytes(self, shape: Sequence[int]) -> int:
        """See `TopK`."""
        return self._top(shape).side_nbytes(self._blocked(shape))

    def reduce(self, tensor: Tensor, key: Key) -> tuple[Tensor, Tensor]:
        """See the base class; values are coefficients, block by block."""
        rows, columns, high, wide = self._geometry(tensor.shape)
        matrix = _as_matrix(tensor, rows * high, columns * wide)
        blocks = matrix.view(rows, high, columns, wide).transpose(1, 2)
        coefficients = cosines(high) @ blocks @ cosines(wide).T
        return self._top(tensor.shape).reduce(coefficients.reshape(self._blocked(tensor.shape)), key)

    def expand(self, values: Tensor, side: Tensor, shape: torch.Size, key: Key) -> Tensor:
        """See the base class, in the space of coefficients; then transformed back."""
        rows, columns, high, wide = self._geometry(shape)
        kept = self._top(shape).expand(values, side, torch.Size(self._blocked(shape)), key)
        blocks = cosines(high).T @ kept.view(rows, columns, high, wide) @ cosines(wide)
        matrix = blocks.transpose(1, 2).reshape(rows * high, columns * wide)
        if len(shape) == 2:
            return matrix[: shape[0], : shape[1]].contiguous()
        return matrix.flatten()[: math.prod(shape)].view(shape)

    def _geometry(self, shape: Sequence[int]) -> tuple[int, int, int, int]:
        """Blocks down, blocks across, and a block's height and width."""
        if len(shape) == 2:
            high, wide = min(self.size, shape[0]), min(self.size, shape[1])
            return -(-shape[0] // high), -(-shape[1] // wide), high, wide
        numel = math.prod(shape)
        wide = min(self.size, numel)
        return -(-numel // wide), 1, 1, wide

    def _blocked(self, shape: Sequence[int]) -> tuple[int, int]:
        rows, columns, high, wide = self._geometry(shape)
        return rows * columns, high * wide

    def _top(self, shape: Sequence[int]) -> TopK:
        area = self._blocked(shape)[1]
        return TopK(min(self.k, area), area)


def _as_matrix(tensor: Tensor, rows: int, columns: int) -> Tensor:
    if tensor.dim() == 2:
        padding = (0, columns - tensor.shape[1], 0, rows - tensor.shape[0])
        return torch.nn.functional.pad(tensor, padding)
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, rows * columns - flat.numel())).view(rows, columns)


def cosines(size: int) -> Tensor:
    """fp32 [size, size] orthonormal DCT-II: row f holds the cosine of frequency f, computed in fp64."""
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    place = torch.arange(size, dtype=torch.float64)[None, :] + 0.5
    basis = torch.cos(math.pi / size * frequency * place) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis.float()
