"""DeMo: only the fast-moving part of the momentum travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.compression import ErrorFeedback, build_averager
from trainer.method_config import DeMoConfig
from trainer.methods.base import Context, Method
from trainer.methods.buckets import gradient
from trainer.state import State


class DeMo(Method):
    """arXiv:2411.19870, algorithm 1: m <- decay m + g; q = the k largest DCT coefficients of each block
    of m; m <- m - q; all q are gathered and averaged; the weights move by lr times the sign of the mean.

    The sign is handed to the inner optimiser as the gradient, which must be plain SGD (`train.inner:
    sgd`). What has not been sent stays in m: which is error feedback with a
    decay.

    Reconstruction: weight decay is the inner optimiser's, and plain SGD here has none; `compressor` may
    be any, the source's is DCT blocks of 64 with k = 32.
    """

    def __init__(self, config: DeMoConfig, context: Context) -> None:
        super().__init__(context)
        averager = build_averager(config.compressor, context.shapes, context.seed)
        self._momentum = ErrorFeedback(averager, config.momentum)

    def planned_step_bytes(self) -> int:
        """What the averager sends."""
        return self._momentum.planned_bytes(self.context.wan)

    def average_gradients(self) -> None:
        """Gradient <- sign of the mean of what everybody sent."""
        parameters = self.context.parameters
        with self.context.ledger.span("compress_s"):
            gradients = {name: gradient(parameter) for name, parameter in parameters.items()}
            averaged = self._momentum.average(
                self.context.weighted(gradients), self.context.wan, self.context.ledger
            )
            for name, own in gradients.items():
                own.copy_(averaged.mean[name].sign())

    def synchronises_after(self, step: int, *, last: bool) -> bool:
        """After every step: replicas never differ."""
        return True

    def state_dict(self) -> State:
        """Momentum and the averager's state."""
        return self._momentum.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        self._momentum.load_state_dict(state)
