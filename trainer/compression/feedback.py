"""Error feedback: what was not sent is sent later; wraps any averager."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.collectives import Exchange
from trainer.compression.averagers import Averaged, Averager, TakeSent, Tensors, ignore_sent
from trainer.metrics import Ledger
from trainer.state import State, take_tensors


class ErrorFeedback(Averager):
    """Sends input + decay x residual and keeps what was not sent as the next residual (arXiv:1901.09847).

    Invariant: sent + residual = input + decay x previous residual, to fp32 rounding, whatever is wrapped:
    for a chain, all of its parts' errors together. The one buffer first takes in the input and then gives
    up what was sent, tensor by tensor. If an exchange fails, it still owes the input.
    """

    def __init__(self, inner: Averager, decay: float = 1.0) -> None:
        super().__init__(inner.shapes)
        self.inner, self.decay = inner, decay
        self.residual: Tensors = {name: torch.zeros(shape) for name, shape in inner.shapes.items()}

    def state_dict(self) -> State:
        """The residual, and the wrapped averager's state."""
        return {"residual": dict(self.residual), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        self.residual = take_tensors("error feedback", state["residual"], self.shapes)
        self.inner.load_state_dict(state["inner"])

    def forget(self) -> None:
        """No residual, and what the wrapped averager does."""
        self.residual = {name: torch.zeros(shape) for name, shape in self.shapes.items()}
        self.inner.forget()

    @property
    def rank(self) -> int | None:  # type: ignore[override]
        """The wrapped averager's."""
        return self.inner.rank

    def set_rank(self, rank: int) -> None:
        """Hand on to the wrapped averager."""
        self.inner.set_rank(rank)

    def planned_bytes(self, exchange: Exchange) -> int:
        """The wrapped averager's: feedback sends nothing of its own."""
        return self.inner.planned_bytes(exchange)

    def average(
        self, tensors: Tensors, exchange: Exchange, ledger: Ledger, take_sent: TakeSent = ignore_sent
    ) -> Averaged:
        """See the base class; `relative_error` is that of input + decay x residual."""
        for name, residual in self.residual.items():
            residual.mul_(self.decay).add_(tensors[name])

        def settle(name: str, sent: Tensor) -> None:
            take_sent(name, sent)
            self.residual[name].sub_(sent)

        return self.inner.average(self.residual, exchange, ledger, settle)
