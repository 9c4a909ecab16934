"""DiLoCoX: compressed pseudo-gradients, exchanged while the next round trains."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.compression.rank_control import RankControl
from trainer.compressor_config import LowRankCompressor
from trainer.method_config import DiLoCoXConfig
from trainer.methods.base import Context, copy_into
from trainer.methods.diloco import DiLoCo
from trainer.methods.local_update import Finished
from trainer.metrics import Ledger
from trainer.state import State, take_tensors

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Ended:
    """A round that has ended and whose pseudo-gradient is still to be sent."""

    number: int
    local_steps: int
    delta: Tensors


class DiLoCoX(DiLoCo):
    """Reconstruction of arXiv:2506.21263, of which only the abstract and secondary sources were at hand.

    With `delay_rounds: 1` the exchange of round t's pseudo-gradient runs in a background thread, on the
    stage peers' own process group, while round t+1 trains. At the end of round t+1 it is waited for and
    applied, once: theta_{t+1} = Outer(theta_t, Delta_t). What the local weights of the following round
    start from is our choice where the abstract is silent:

    - `keep`: start_{t+1} = theta - delta_i(t), own progress in flight is re-applied on top;
    - `discard`: start_{t+1} = theta, own progress shows only when its average arrives.

    With `delay_rounds: 0` it is DiLoCo with this method's compression and adaptive H. The last,
    possibly shorter round is exchanged too. Rank and H of a round depend only on exchanges that were
    applied before it began, so every rank knows the same.
    """

    def __init__(self, config: DiLoCoXConfig, context: Context, seed: int) -> None:
        super().__init__(config, context, seed)
        self._delayed = config.overlap.delay_rounds == 1
        self._keep = config.overlap.progress == "keep"
        compressor = config.compressor
        self._control: RankControl | None = None
        if isinstance(compressor, LowRankCompressor) and compressor.adaptive:
            self._control = RankControl(compressor, config.local_steps)
        self._start = {name: p.detach().clone() for name, p in context.parameters.items()}
        self._ended: Ended | None = None
        self._in_flight: Future[Finished] | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="exchange")

    def round_start(self) -> Tensors:
        """theta, or under one-step delay what `open_round` chose."""
        return self._start if self._delayed else super().round_start()

    def close_round(self, step: int) -> None:
        """Under one-step delay: apply the previous round's exchange, keep this round's delta for later."""
        if not self._delayed:
            super().close_round(step)
            return
        delta = self.pseudo_gradient()
        number, local_steps = self.end_round()
        self._wait_and_apply(step)
        self._ended = Ended(number, local_steps, delta)

    def open_round(self) -> None:
        """Launch the exchange of the round that ended, and set where the next one starts."""
        if self._ended is None:
            return
        ended, self._ended = self._ended, None
        self._launch(ended)
        theta = self.outer_parameters
        with torch.no_grad():
            self._start = {
                name: theta[name] - ended.delta[name] if self._keep else theta[name].clone() for name in theta
            }
        copy_into(self.context.parameters, self._start)

    def drain(self, step: int) -> None:
        """Exchange and apply the last round; the model then holds theta."""
        if self._ended is not None:
            ended, self._ended = self._ended, None
            self._launch(ended)
            self._wait_and_apply(step)
        copy_into(self.context.parameters, self.outer_parameters)
        self._background.shutdown()

    def state_dict(self) -> State:
        """Also the ended round that `open_round` will send, and what the rank control has seen."""
        ended = self._ended
        kept = ended and {"number": ended.number, "local_steps": ended.local_steps, "delta": ended.delta}
        control = self._control.state_dict() if self._control else None
        return {**super().state_dict(), "ended": kept, "control": control}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        super().load_state_dict(state)
        kept = state["ended"]
        if kept is not None:
            delta = take_tensors("ended round", kept["delta"], self.context.parameters)
            self._ended = Ended(int(kept["number"]), int(kept["local_steps"]), delta)
        if self._control is not None:
            self._control.load_state_dict(state["control"])

    def choose_next(self, finished: Finished) -> int | None:
        """Rank and H from the energy that this exchange captured on all stages together."""
        if self._control is None or finished.rank_r is None:
            return None
        energy = finished.averaged.energy
        own = torch.zeros(finished.rank_r + 1, dtype=torch.float64)
        if energy is not None:
            own[:-1], own[-1] = energy.columns, energy.total
        whole = torch.stack(self.context.lan.gather_float64(own, self.context.ledger)).sum(dim=0)
        effective = self._control.observe(whole[:-1], float(whole[-1]))
        if self._control.rank != self.averager.rank:
            self.averager.set_rank(self._control.rank)
        self.local_steps = self._control.local_steps
        return effective

    def _launch(self, ended: Ended) -> None:
        def run() -> Finished:
            torch.set_num_threads(1)  # a thread does not inherit it everywhere
            return self.exchange(ended.delta, ended.number, ended.local_steps, Ledger("compress_s"))

        self._in_flight = self._background.submit(run)

    def _wait_and_apply(self, step: int) -> None:
        if self._in_flight is None:
            return
        ledger, bucket = self.context.ledger, self.context.wan.bucket
        before = ledger.read()[bucket]
        with ledger.span(bucket):
            finished = self._in_flight.result()
        self._in_flight = None
        self.apply(finished, ledger.read()[bucket] - before, step)
