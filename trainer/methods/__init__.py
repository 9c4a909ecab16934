"""How replicas agree: every method is one class behind `Method`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer import method_config as configs
from trainer.config import TrainerConfig
from trainer.methods.allreduce import AllReduce
from trainer.methods.base import Context, ExchangeError, Method, RoundRecord
from trainer.methods.cocktail_sgd import CocktailSGD
from trainer.methods.custom import build_custom
from trainer.methods.demo import DeMo
from trainer.methods.diloco import DiLoCo
from trainer.methods.dilocox import DiLoCoX
from trainer.methods.eager_diloco import EagerDiLoCo
from trainer.methods.intellect1 import Intellect1
from trainer.methods.local_sgd import LocalSgd
from trainer.methods.noloco import NoLoCo
from trainer.methods.opendiloco import OpenDiLoCo
from trainer.methods.powersgd import PowerSGD
from trainer.methods.sparse_loco import SparseLoCo
from trainer.methods.streaming_diloco import StreamingDiLoCo
from trainer.presets import MethodSection

__all__ = ["Context", "ExchangeError", "Method", "RoundRecord", "build_method"]

METHODS: dict[type[MethodSection], Callable[[Any, Context], Method]] = {
    configs.AllReduceConfig: AllReduce,
    configs.LocalSgdConfig: LocalSgd,
    configs.DiLoCoConfig: DiLoCo,
    configs.OpenDiLoCoConfig: OpenDiLoCo,
    configs.Intellect1Config: Intellect1,
    configs.StreamingDiLoCoConfig: StreamingDiLoCo,
    configs.EagerDiLoCoConfig: EagerDiLoCo,
    configs.DiLoCoXConfig: DiLoCoX,
    configs.CocktailSgdConfig: CocktailSGD,
    configs.SparseLoCoConfig: SparseLoCo,
    configs.DeMoConfig: DeMo,
    configs.PowerSgdConfig: PowerSGD,
    configs.NoLoCoConfig: NoLoCo,
    configs.CustomConfig: build_custom,
}


def build_method(config: TrainerConfig, context: Context) -> Method:
    """The method that a configuration asks for.

    Raises:
        ConfigError: a custom method cannot be imported, or refuses its options.
    """
    return METHODS[type(config.method)](config.method, context)
