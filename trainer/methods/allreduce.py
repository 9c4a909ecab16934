"""The baseline: replicas average their gradients in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trainer.method_config import AllReduceConfig
from trainer.methods.base import Context, Method
from trainer.state import State, check_keys


class AllReduce(Method):
    """Data-parallel training; all parameters' gradients travel as one flat tensor."""

    def __init__(self, config: AllReduceConfig, context: Context) -> None:
        super().__init__(context)
        self.config = config
        self._sizes = [parameter.numel() for parameter in context.parameters.values()]

    def planned_step_bytes(self) -> int:
        """See `Exchange.planned_mean_bytes`."""
        config = self.config
        return self.context.wan.planned_mean_bytes(sum(self._sizes), config.wire, config.collective)

    def average_gradients(self) -> None:
        """Gradient <- mean of the replicas' gradients, the same bits everywhere."""
        context = self.context
        if context.wan.size == 1:
            return
        parameters = list(context.parameters.values())
        flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in parameters])
        if context.weight != 1.0:
            flat *= context.weight
        mean = context.wan.mean(flat, self.config.wire, self.config.collective, context.ledger)
        for parameter, piece in zip(parameters, torch.split(mean, self._sizes), strict=True):
            _gradient(parameter).copy_(piece.view_as(parameter))

    def synchronises_after(self, step: int, *, last: bool) -> bool:
        """After every step: replicas never differ."""
        return True

    def state_dict(self) -> State:
        """Nothing outlives a step."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `state_dict`."""
        check_keys("allreduce", set(state), set())


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    if parameter.grad is None:
        raise RuntimeError("every parameter has a gradient after a backward pass")
    return parameter.grad
