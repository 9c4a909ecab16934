"""OpenDiLoCo: DiLoCo with half the bytes."""

from __future__ import annotations

from trainer.methods.local_update import LocalUpdate


class OpenDiLoCo(LocalUpdate):
    """arXiv:2407.07852: pseudo-gradients travel in fp16, without error feedback.

    Reconstruction: the source averages with an all-reduce that also sums in fp16; here each replica's
    fp16 values are averaged in fp32, which loses less and gives every replica the same bits.
    """
