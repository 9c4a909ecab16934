"""INTELLECT-1: DiLoCo with pseudo-gradients in int8."""

from __future__ import annotations

from trainer.methods.local_update import LocalUpdate


class Intellect1(LocalUpdate):
    """arXiv:2412.01152: pseudo-gradients in int8, limited to 6 standard deviations (root
    mean squares here: the mean is about zero), H = 100.

    Reconstruction: the source's int8 codes point into a table of means, quantised uniformly between the
    limits; here one scale for each block of values. Its ring re-quantises partial sums, here values are
    averaged in fp32.
    """
