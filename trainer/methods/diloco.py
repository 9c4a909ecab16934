"""DiLoCo: local steps, a synchronous average of pseudo-gradients, one outer step."""

from __future__ import annotations

from torch import Tensor

from trainer.compression import build_averager
from trainer.method_config import DiLoCoConfig, DiLoCoXConfig
from trainer.methods.base import Context, copy_into
from trainer.methods.local_update import LocalUpdate


class DiLoCo(LocalUpdate):
    """arXiv:2311.08105, algorithm 1; every replica starts every round from theta."""

    def __init__(self, config: DiLoCoConfig | DiLoCoXConfig, context: Context, seed: int) -> None:
        shapes = {name: parameter.shape for name, parameter in context.parameters.items()}
        averager = build_averager(config.compressor, shapes, seed)
        super().__init__(context, averager, config.outer, config.local_steps)

    def round_start(self) -> dict[str, Tensor]:
        """theta itself."""
        return self.outer_parameters

    def close_round(self, step: int) -> None:
        """Exchange, wait, step; the model then holds theta."""
        delta = self.pseudo_gradient()
        finished = self.exchange(delta, *self.end_round(), self.context.ledger)
        self.apply(finished, finished.comm_s, step)
        copy_into(self.context.parameters, self.outer_parameters)
