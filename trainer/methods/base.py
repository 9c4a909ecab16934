"""What a method must do, and what it is given to do it with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.collectives import Exchange
from trainer.metrics import Ledger
from trainer.model import parameter_hash
from trainer.state import State
from trainer.survive import Survivors


class ExchangeError(RuntimeError):
    """An exchange between replicas failed; the message names rank and round."""


@dataclass(frozen=True)
class RoundRecord:
    """One finished outer step, as written to the rounds file; seconds, bytes, norms as named.

    `step` is the training step at whose end the round's average was applied; `comm_s` the time its
    exchange spent in the transport, of which training waited for `exposed_comm_s`.
    """

    round: int
    local_steps: int
    next_local_steps: int
    rank_r: int | None
    effective_rank: int | None
    compress_s: float
    comm_s: float
    exposed_comm_s: float
    payload_bytes: int
    planned_bytes: int
    relative_error: float
    delta_norm: float
    outer_lr: float
    step: int
    outer_hash: str


@dataclass(frozen=True)
class Context:
    """One rank's surroundings: `wan` joins stage peers, `lan` the stages of this replica.

    `microbatches`: how often each parameter's gradient grows in one training step. `weight`: this
    replica's share of all tokens times the number of replicas; what it adds to a mean is multiplied by it.
    `layers`: of the whole model. `computed(numel)`: tells the pace, in the backward pass, that so many
    gradients are final.
    `survivors`: where the run goes on without a lost replica.
    """

    rank: int
    parameters: dict[str, nn.Parameter]
    wan: Exchange
    lan: Exchange
    ledger: Ledger
    report_round: Callable[[RoundRecord], None]
    seed: int = 0
    microbatches: int = 1
    weight: float = 1.0
    layers: int = 1
    computed: Callable[[int], None] = lambda numel: None
    survivors: Survivors | None = None

    def weighted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """This replica's part of a mean over replicas; the tensors themselves where all batches are equal."""
        if self.weight == 1.0:
            return tensors
        return {name: tensor * self.weight for name, tensor in tensors.items()}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of each parameter, by name."""
        return {name: parameter.shape for name, parameter in self.parameters.items()}


class Method(ABC):
    """Called by the training loop in this order:

    each step: `average_gradients`, the inner step, and where `synchronises_after(step)` says so
    `close_round`, an evaluation and a checkpoint if they are due, and at the beginning of the next step
    `open_round`. After the last step `drain` follows, and then the evaluation. Between `close_round` and `open_round` no exchange
    is in flight and the outer parameters are up to date.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    consensus = True
    """Whether all replicas hold bit-identical outer parameters after every round."""

    def average_gradients(self) -> None:  # noqa: B027 - methods with local steps leave gradients alone
        """Replace each gradient by what the inner optimiser should see."""

    def updates_after(self, step: int, *, last: bool) -> bool:
        """Whether the inner optimiser steps now; if not, gradients are left to grow."""
        return True

    @abstractmethod
    def planned_step_bytes(self) -> int:
        """WAN payload bytes that the next `average_gradients` will send from this rank."""

    def steady_step_bytes(self) -> int:
        """`planned_step_bytes` once whatever is different about the first steps is over."""
        return self.planned_step_bytes()

    def planned_round_bytes(self) -> int:
        """WAN payload bytes that one whole round sends from this rank, beyond those of its steps."""
        return 0

    @abstractmethod
    def synchronises_after(self, step: int, *, last: bool) -> bool:
        """Whether a round ends with this step (counted from 1)."""

    def close_round(self, step: int) -> None:  # noqa: B027 - nothing to do without rounds
        """Finish what is due at the end of a round, up to the outer step."""

    def open_round(self) -> None:  # noqa: B027
        """Begin the next round: launch what overlaps with it, set the local parameters."""

    def drain(self, step: int) -> None:  # noqa: B027
        """After the last round: finish and apply everything that is still to be exchanged."""

    def state_dict(self) -> State:
        """Everything that a resumed process needs beside the configuration and the model's parameters.

        Called between `close_round` and `open_round`; whoever has an exchange in flight then waits for it
        here and includes its result. Must not change what training goes on to do: killed and resumed is
        never killed, bit for bit. Tensors may be the live ones, the caller copies them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no state_dict: it cannot be checkpointed")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; `open_round` comes next. The tensors are the method's to keep.

        Raises:
            StateError: the state does not fit.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load_state_dict: it cannot be resumed")

    def begin_as_newcomer(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of a peer, having contributed nothing to what is in flight."""
        raise NotImplementedError(f"{type(self).__name__} lets nobody in")

    @property
    def outer_parameters(self) -> dict[str, Tensor]:
        """The parameters that validation and checkpoints see."""
        return {name: parameter.detach() for name, parameter in self.context.parameters.items()}

    def outer_hash(self) -> str:
        """sha256 (hex) of this stage's outer parameters."""
        return parameter_hash(self.outer_parameters)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the outer parameters into the model, and the local ones back afterwards."""
        local = {name: p.detach().clone() for name, p in self.context.parameters.items()}
        copy_into(self.context.parameters, self.outer_parameters)
        try:
            yield
        finally:
            copy_into(self.context.parameters, local)


def copy_into(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    """parameters <- values, in place, without autograd noticing."""
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])
