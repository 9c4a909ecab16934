"""DiLoCoX: compressed pseudo-gradients, exchanged while the next round trains."""

from __future__ import annotations

from trainer.methods.local_update import LocalUpdate


class DiLoCoX(LocalUpdate):
    """Reconstruction of arXiv:2506.21263, of which only the abstract and secondary sources were at hand.

    One-step delay, low-rank factors in int4 with error feedback, rank and H that adapt to the energy the
    factors capture. What local weights start from after a delayed update is our choice where the abstract
    is silent (`overlap.progress`, see `LocalUpdate`): `eager` by default, which a recorded ablation favours over
    `keep` and `discard` (three seeds, equal tuning budgets: docs/LOG.md, experiments/sweeps/ablation-dilocox.yaml).

    Ablations, each by one key: `overlap.delay_rounds: 0` (no overlap), `compressor.name: int4` (no low
    rank), `compressor.name: lowrank` (no quantisation), `compressor.error_feedback: false`,
    `compressor.adaptive: false`.
    """
