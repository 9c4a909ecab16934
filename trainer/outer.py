"""The outer optimiser: shared parameters moved by averaged pseudo-gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from trainer.method_config import NesterovOuter, SgdOuter
from trainer.model import parameter_hash


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

    def hash(self) -> str:
        """sha256 (hex) of theta's names and bits."""
        return parameter_hash(self.theta)
