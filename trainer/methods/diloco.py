"""DiLoCo: local steps, a synchronous average of pseudo-gradients, one outer step."""

from __future__ import annotations

from trainer.methods.local_update import LocalUpdate


class DiLoCo(LocalUpdate):
    """arXiv:2311.08105, algorithm 1; every replica starts every round from theta."""
