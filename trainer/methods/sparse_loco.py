"""SparseLoCo: few values of the pseudo-gradient, in two bits each."""

from __future__ import annotations

from trainer.methods.local_update import LocalUpdate


class SparseLoCo(LocalUpdate):
    """arXiv:2508.15706 (Covenant-72B, arXiv:2603.08163, uses it): error feedback with decay 0.95, the 64
    largest of each 4096 values in 2 bits with 12-bit positions, an outer step of plain SGD.

    Reconstruction: the source's chunks are 64 x 64 blocks of a matrix, here 4096 values in row order.
    """
