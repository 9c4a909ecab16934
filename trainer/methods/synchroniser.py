"""One set of tensors that replicas agree on: compressed average, outer step, record; in the background if wanted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.collectives import Exchange
from trainer.compression import Averaged, Averager
from trainer.compression.averagers import TakeSent, ignore_sent
from trainer.method_config import NesterovOuter, SgdOuter
from trainer.methods.base import Context, ExchangeError, RoundRecord
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


class Synchroniser:
    """An averager of pseudo-gradients and the outer optimiser that applies the average."""

    def __init__(
        self,
        context: Context,
        parameters: Mapping[str, Tensor],
        averager: Averager,
        outer: NesterovOuter | SgdOuter,
    ) -> None:
        self.context = context
        self.averager = averager
        self.outer = OuterOptimizer(parameters, outer)

    def exchange(
        self,
        delta: Tensors,
        number: int,
        local_steps: int,
        ledger: Ledger,
        take_sent: TakeSent = ignore_sent,
    ) -> Finished:
        """`timed_average` of `delta` over all replicas."""
        context = self.context
        return timed_average(
            self.averager,
            context.wan,
            context.weighted(delta),
            ledger,
            rank=context.rank,
            number=number,
            local_steps=local_steps,
            take_sent=take_sent,
        )

    def apply(
        self,
        finished: Finished,
        step: int,
        *,
        exposed_comm_s: float,
        delta: Tensors | None = None,
        choose_next: Callable[[Finished], tuple[int, int | None]] | None = None,
        outer_hash: Callable[[], str] | None = None,
    ) -> None:
        """The outer step of a finished exchange, and its record.

        Args:
            finished: what `exchange` returned.
            step: training step at whose end this happens.
            exposed_comm_s: seconds that training waited for the exchange.
            delta: what the outer optimiser gets, the average where None.
            choose_next: gives the next H, and the effective rank if that was measured.
            outer_hash: of all outer parameters, where these are a part of them.
        """
        self.outer.apply(finished.averaged.mean if delta is None else delta)
        local_steps, effective_rank = choose_next(finished) if choose_next else (finished.local_steps, None)
        report(
            self.context,
            finished,
            step,
            exposed_comm_s=exposed_comm_s,
            next_local_steps=local_steps,
            effective_rank=effective_rank,
            outer_lr=self.outer.lr,
            outer_hash=outer_hash() if outer_hash else self.outer.hash(),
        )

    def state_dict(self) -> State:
        """theta and momentum, and the averager's state."""
        return {"outer": self.outer.state_dict(), "averager": self.averager.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse; raises StateError where the state does not fit."""
        self.outer.load_state_dict(state["outer"])
        self.averager.load_state_dict(state["averager"])


class Background:
    """At most one exchange at a time beside training, in a thread of its own."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")

    def launch(self, run: Callable[[Ledger], Finished]) -> Future[Finished]:
        """Start `run` once those launched before have ended; it gets a ledger of its own."""

        def alone() -> Finished:
            torch.set_num_threads(1)  # a thread does not inherit it everywhere
            return run(Ledger("compress_s"))

        return self._thread.submit(alone)

    def wait(self, future: Future[Finished]) -> tuple[Finished, float]:
        """What was exchanged, and the seconds that this took from training."""
        ledger, bucket = self._context.ledger, self._context.wan.bucket
        before = ledger.read()[bucket]
        with ledger.span(bucket):
            finished = future.result()
        return finished, ledger.read()[bucket] - before

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()


def timed_average(
    averager: Averager,
    exchange: Exchange,
    delta: Tensors,
    ledger: Ledger,
    *,
    rank: int,
    number: int,
    local_steps: int,
    take_sent: TakeSent = ignore_sent,
) -> Finished:
    """Average `delta` over an exchange's members; may run in another thread with a ledger of its own.

    Raises:
        ExchangeError: anything went wrong; names rank and round.
    """
    before, sent_before = ledger.read(), exchange.sent_bytes
    try:
        planned = averager.planned_bytes(exchange)
        rank_r = averager.rank
        with ledger.span("compress_s"):
            averaged = averager.average(delta, exchange, ledger, take_sent)
    except (RuntimeError, ValueError) as error:
        raise ExchangeError(f"rank {rank}, round {number}: exchange failed: {error}") from error
    spent = difference(ledger.read(), before)
    return Finished(
        number,
        local_steps,
        averaged,
        rank_r,
        compress_s=spent["compress_s"],
        comm_s=spent[exchange.bucket],
        payload_bytes=exchange.sent_bytes - sent_before,
        planned_bytes=planned,
        delta_norm=math.sqrt(sum(float(d.double().square().sum()) for d in delta.values())),
    )


def report(
    context: Context,
    finished: Finished,
    step: int,
    *,
    exposed_comm_s: float,
    next_local_steps: int,
    outer_lr: float,
    outer_hash: str,
    effective_rank: int | None = None,
) -> None:
    """Hand the record of an applied exchange to whoever writes them."""
    context.report_round(
        RoundRecord(
            round=finished.round,
            local_steps=finished.local_steps,
            next_local_steps=next_local_steps,
            rank_r=finished.rank_r,
            effective_rank=effective_rank,
            compress_s=finished.compress_s,
            comm_s=finished.comm_s,
            exposed_comm_s=exposed_comm_s,
            payload_bytes=finished.payload_bytes,
            planned_bytes=finished.planned_bytes,
            relative_error=finished.averaged.relative_error,
            delta_norm=finished.delta_norm,
            outer_lr=outer_lr,
            step=step,
            outer_hash=outer_hash,
        )
    )
