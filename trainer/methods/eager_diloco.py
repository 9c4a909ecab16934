"""Eager DiLoCo: the own share of an average that is still under way is used at once."""

from __future__ import annotations

from trainer.methods.local_update import LocalUpdate


class EagerDiLoCo(LocalUpdate):
    """arXiv:2502.12996, eager updates: g_i = Delta_{t-1} + (delta_i(t) - delta_i(t-1)) / D.

    theta and momentum are each replica's own, so there is no consensus: what is evaluated is replica 0's
    theta. See `LocalUpdate` for what the replicas do share.
    """
