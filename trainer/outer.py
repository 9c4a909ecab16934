"""The outer optimiser: shared parameters moved by averaged pseudo-gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.method_config import NesterovOuter, SgdOuter
from trainer.model import parameter_hash
from trainer.state import State, load_optimizer_state, optimizer_state, take_tensors


class OuterOptimizer:
    """theta_t = Outer(theta_{t-1}, Delta), where Delta is a mean of start - end (arXiv:2311.08105).

    Holds one stage's own copy of theta (fp32) and, with momentum, one buffer of the same size. As theta
    and every Delta are the same on all stage peers, so are the results, bit for bit.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: NesterovOuter | SgdOuter) -> None:
        self.theta: dict[str, nn.Parameter] = {
            name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()
        }
        momentum = config.momentum if isinstance(config, NesterovOuter) else 0.0
        self.lr = config.lr
        self._sgd = torch.optim.SGD(
            self.theta.values(), lr=config.lr, momentum=momentum, nesterov=momentum > 0
        )

    def apply(self, delta: Mapping[str, Tensor]) -> None:
        """One outer step with the averaged pseudo-gradient `delta`."""
        for name, parameter in self.theta.items():
            parameter.grad = delta[name]
        self._sgd.step()
        self._sgd.zero_grad(set_to_none=True)

    def state_dict(self) -> State:
        """theta, and the momentum of each parameter that has one."""
        return {"theta": dict(self.theta), "optimizer": optimizer_state(self._sgd, self.theta)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """theta's tensors stay the same objects; raises StateError if names or shapes differ."""
        loaded = take_tensors("outer optimiser", state["theta"], self.theta)
        with torch.no_grad():
            for name, parameter in self.theta.items():
                parameter.copy_(loaded[name])
        load_optimizer_state(self._sgd, self.theta, state["optimizer"])

    def hash(self) -> str:
        """sha256 (hex) of theta's names and bits."""
        return parameter_hash(self.theta)
