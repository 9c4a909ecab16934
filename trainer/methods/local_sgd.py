"""Local SGD: weights averaged every H steps."""

from __future__ import annotations

from trainer.methods.local_update import LocalUpdate


class LocalSgd(LocalUpdate):
    """arXiv:1805.09767: an outer step of plain SGD at rate 1 is the average of the replicas' weights.

    Differs from the source in that the inner optimiser is the run's (`train.inner`) and keeps its own
    state over the average.
    """
