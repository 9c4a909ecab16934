"""What methods with local steps share: rounds, pseudo-gradients, one exchange, one outer step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.compression import Averaged, Averager
from trainer.method_config import NesterovOuter, SgdOuter
from trainer.methods.base import Context, ExchangeError, Method, RoundRecord
from trainer.metrics import Ledger, difference
from trainer.outer import OuterOptimizer
from trainer.state import State

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Finished:
    """An exchange that is over but not yet applied."""

    round: int
    local_steps: int
    averaged: Averaged
    rank_r: int | None
    compress_s: float
    comm_s: float
    payload_bytes: int
    planned_bytes: int
    delta_norm: float


class LocalUpdate(Method):
    """Rounds of `local_steps` inner steps; the last round may be shorter and is exchanged too.

    Subclasses decide when an exchange runs and what the next round starts from.
    """

    def __init__(
        self, context: Context, averager: Averager, outer: NesterovOuter | SgdOuter, local_steps: int
    ) -> None:
        super().__init__(context)
        self.averager = averager
        self.outer = OuterOptimizer(context.parameters, outer)
        self.local_steps = local_steps
        self.round = 1
        self._steps_in_round = 0

    def planned_step_bytes(self) -> int:
        """Nothing travels in a step; see the rounds."""
        return 0

    @property
    def outer_parameters(self) -> Tensors:
        """theta."""
        return {name: parameter.detach() for name, parameter in self.outer.theta.items()}

    def synchronises_after(self, step: int, *, last: bool) -> bool:
        """After H local steps, and after the last step."""
        self._steps_in_round += 1
        return last or self._steps_in_round >= self.local_steps

    def state_dict(self) -> State:
        """theta and momentum, the averager's state, the number and length of the next round."""
        return {
            "outer": self.outer.state_dict(),
            "averager": self.averager.state_dict(),
            "local_steps": self.local_steps,
            "round": self.round,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        self.outer.load_state_dict(state["outer"])
        self.averager.load_state_dict(state["averager"])
        self.local_steps, self.round = int(state["local_steps"]), int(state["round"])
        self._steps_in_round = 0

    @abstractmethod
    def round_start(self) -> Tensors:
        """Parameters that this replica's current round started from."""

    def pseudo_gradient(self) -> Tensors:
        """delta = start - end of the round that just ended."""
        start = self.round_start()
        with torch.no_grad():
            return {name: start[name] - p for name, p in self.context.parameters.items()}

    def exchange(self, delta: Tensors, number: int, local_steps: int, ledger: Ledger) -> Finished:
        """Average `delta` over replicas; may run in another thread with a ledger of its own.

        Raises:
            ExchangeError: anything went wrong; names rank and round.
        """
        wan = self.context.wan
        before, sent_before = ledger.read(), wan.sent_bytes
        try:
            planned = self.averager.planned_bytes(wan)
            rank_r = self.averager.rank
            with ledger.span("compress_s"):
                averaged = self.averager.average(delta, wan, ledger)
        except (RuntimeError, ValueError) as error:
            raise ExchangeError(
                f"rank {self.context.rank}, round {number}: exchange failed: {error}"
            ) from error
        spent = difference(ledger.read(), before)
        return Finished(
            number,
            local_steps,
            averaged,
            rank_r,
            compress_s=spent["compress_s"],
            comm_s=spent[wan.bucket],
            payload_bytes=wan.sent_bytes - sent_before,
            planned_bytes=planned,
            delta_norm=math.sqrt(sum(float(d.double().square().sum()) for d in delta.values())),
        )

    def choose_next(self, finished: Finished) -> int | None:
        """Decide rank and H from a finished exchange; returns its effective rank if that was measured."""
        return None

    def apply(self, finished: Finished, exposed_comm_s: float, step: int) -> None:
        """The outer step of a finished exchange, and its record."""
        self.outer.apply(finished.averaged.mean)
        effective_rank = self.choose_next(finished)
        self.context.report_round(
            RoundRecord(
                round=finished.round,
                local_steps=finished.local_steps,
                next_local_steps=self.local_steps,
                rank_r=finished.rank_r,
                effective_rank=effective_rank,
                compress_s=finished.compress_s,
                comm_s=finished.comm_s,
                exposed_comm_s=exposed_comm_s,
                payload_bytes=finished.payload_bytes,
                planned_bytes=finished.planned_bytes,
                relative_error=finished.averaged.relative_error,
                delta_norm=finished.delta_norm,
                outer_lr=self.outer.lr,
                step=step,
                outer_hash=self.outer.hash(),
            )
        )

    def end_round(self) -> tuple[int, int]:
        """(number, local steps) of the round that just ended; the next one begins."""
        ended = self.round, self._steps_in_round
        self.round += 1
        self._steps_in_round = 0
        return ended
