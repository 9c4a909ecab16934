"""What a configuration will send across the WAN, from the methods' own plans; nothing is run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from trainer.collectives import Exchange
from trainer.config import TrainerConfig
from trainer.data import BYTE_VOCAB
from trainer.methods import Context, build_method
from trainer.metrics import Ledger
from trainer.model import DecoderStage, Shape, stage_layers
from trainer.transfer import Phase


@dataclass(frozen=True)
class NoTransport:
    """Members that are never connected."""

    index: int
    size: int
    handshake_bytes: int = 0

    def run(self, phases: list[Phase]) -> None:
        """Refused."""
        raise RuntimeError("nothing is sent while a configuration is planned")

    def framing_bytes(self, phases: list[Phase]) -> int:
        """Nothing."""
        return 0

    def stream(self, name: str) -> NoTransport:
        """Connected as little."""
        return self


class PlannedExchange(Exchange):
    """An exchange of `size` members that can say what it would send, and send nothing."""

    def __init__(self, size: int, index: int) -> None:
        group = dist.ProcessGroup(index, size)  # type: ignore[call-arg]
        super().__init__(group, "exposed_comm_s", NoTransport(index, size))


@dataclass(frozen=True)
class Traffic:
    """WAN payload that one replica, all its stages together, hands to the transport; means over replicas.

    `exchange_bytes` in each exchange, of which there is one every `every_steps` training steps.
    """

    every_steps: int
    exchange_bytes: float

    @property
    def bytes_per_step(self) -> float:
        """Of a training step, exchanges spread evenly."""
        return self.exchange_bytes / self.every_steps


def planned_traffic(config: TrainerConfig) -> Traffic:
    """The traffic of a configuration in its steady state: full rounds at the configured H and rank."""
    parallel = config.parallel
    total = 0
    for replica in range(parallel.replicas):
        for stage in range(parallel.stages):
            method = build_method(config, _context(config, replica, stage))
            total += method.steady_step_bytes() + method.planned_round_bytes()
    every = getattr(config.method, "local_steps", getattr(config.method, "accumulate", 1))
    return Traffic(every, total / parallel.replicas)


def _context(config: TrainerConfig, replica: int, stage: int) -> Context:
    parallel, shape = config.parallel, Shape.of(config.model, BYTE_VOCAB)
    pieces = parallel.stages * parallel.pieces
    parameters: dict[str, nn.Parameter] = {}
    for piece in range(stage, pieces, parallel.stages):
        with torch.device("meta"):
            module = DecoderStage(shape, stage_layers(shape.layers, pieces)[piece], config.data.seq_len)
        for name, parameter in module.named_parameters():
            parameters[name] = nn.Parameter(torch.zeros(parameter.shape))
    return Context(
        replica * parallel.stages + stage,
        parameters,
        PlannedExchange(parallel.replicas, replica),
        PlannedExchange(parallel.stages, stage),
        Ledger(),
        lambda record: None,
        config.seed,
        parallel.microbatches,
        layers=shape.layers,
    )
