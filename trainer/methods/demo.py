"""DeMo: only the fast-moving part of the momentum travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer.compression import build_averager
from trainer.method_config import DeMoConfig
from trainer.methods.base import Context, Method
from trainer.methods.buckets import gradient
from trainer.state import State, take_tensors


class DeMo(Method):
    """arXiv:2411.19870, algorithm 1: m <- decay m + g; q = the k largest DCT coefficients of each block
    of m; m <- m - q; all q are gathered and averaged; the weights move by lr times the sign of the mean.

    The sign is handed to the inner optimiser as the gradient, which must be plain SGD (`train.inner:
    sgd`). What has not been sent stays in m: sum of all q sent + m = decayed sum of all gradients.

    Reconstruction: weight decay is the inner optimiser's, and plain SGD here has none; `compressor` may
    be any, the source's is DCT blocks of 64 with k = 32.
    """

    def __init__(self, config: DeMoConfig, context: Context) -> None:
        super().__init__(context)
        self._decay = config.momentum
        self._averager = build_averager(config.compressor, context.shapes, context.seed)
        self._momentum = {name: torch.zeros(shape) for name, shape in context.shapes.items()}

    def planned_step_bytes(self) -> int:
        """What the averager sends."""
        return self._averager.planned_bytes(self.context.wan)

    def average_gradients(self) -> None:
        """Gradient <- sign of the mean of what everybody sent."""
        with self.context.ledger.span("compress_s"):
            for name, parameter in self.context.parameters.items():
                self._momentum[name] = self._decay * self._momentum[name] + gradient(parameter)
            averaged = self._averager.average(self._momentum, self.context.wan, self.context.ledger)
            for name, parameter in self.context.parameters.items():
                self._momentum[name] = self._momentum[name] - averaged.sent[name]
                gradient(parameter).copy_(averaged.mean[name].sign())

    def synchronises_after(self, step: int, *, last: bool) -> bool:
        """After every step: replicas never differ."""
        return True

    def state_dict(self) -> State:
        """Momentum and the averager's state."""
        return {"momentum": dict(self._momentum), "averager": self._averager.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        self._momentum = take_tensors("momentum", state["momentum"], self.context.shapes)
        self._averager.load_state_dict(state["averager"])
