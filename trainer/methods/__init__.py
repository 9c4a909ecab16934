"""How replicas agree: every method is one class behind `Method`."""

from __future__ import annotations

from trainer.config import TrainerConfig
from trainer.method_config import AllReduceConfig, DiLoCoConfig
from trainer.methods.allreduce import AllReduce
from trainer.methods.base import Context, ExchangeError, Method, RoundRecord
from trainer.methods.diloco import DiLoCo
from trainer.methods.dilocox import DiLoCoX

__all__ = ["Context", "ExchangeError", "Method", "RoundRecord", "build_method"]


def build_method(config: TrainerConfig, context: Context) -> Method:
    """The method that a configuration asks for."""
    method = config.method
    if isinstance(method, AllReduceConfig):
        return AllReduce(method, context)
    if isinstance(method, DiLoCoConfig):
        return DiLoCo(method, context, config.seed)
    return DiLoCoX(method, context, config.seed)
