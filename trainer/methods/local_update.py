"""The engine of methods with local steps: rounds, pseudo-gradients, one exchange, one outer step."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.compression import build_averager
from trainer.compression.rank_control import RankControl
from trainer.compressor_config import low_rank_options
from trainer.method_config import LocalUpdateConfig
from trainer.methods.base import Context, Method, copy_into
from trainer.methods.synchroniser import Background, Finished, Synchroniser
from trainer.state import State, take_tensors
from trainer.survive import SurvivingAverager

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Ended:
    """A round that has ended and whose average is still to be applied."""

    number: int
    local_steps: int
    delta: Tensors


class LocalUpdate(Method):
    """Rounds of `local_steps` inner steps; any compressor, overlap rule and outer optimiser.

    Without delay (`delay_rounds: 0`) a round ends with its exchange and the outer step, and every
    replica starts the next one from theta.

    With `delay_rounds: 1` the exchange of round t's pseudo-gradient runs in a background thread, on the
    stage peers' own process group, while round t+1 trains. At the end of round t+1 it is waited for and
    applied, once: theta_{t+1} = Outer(theta_t, Delta_t). What the local weights of the following round
    start from:

    - `keep`: start_{t+1} = theta - delta_i(t), own progress in flight is re-applied on top;
    - `discard`: start_{t+1} = theta, own progress shows only when its average arrives;
    - `eager` (arXiv:2502.12996): theta_i and momentum are each replica's own, moved at the end of round t
      by g_i = Delta_{t-1} + (delta_i(t) - delta_i(t-1)) / D; start_{t+1} = theta_i. The sum of all g_i
      differs between replicas by (delta_i(t) - delta_j(t)) / D only, and not at all once drained; with
      momentum the weights themselves stay apart by what momentum made of those differences.

    The last, possibly shorter round is exchanged too. Rank and H of a round depend only on exchanges
    that were applied before it began, so every rank knows the same.
    """

    def __init__(self, config: LocalUpdateConfig, context: Context) -> None:
        super().__init__(context)
        averager = build_averager(config.compressor, context.shapes, context.seed)
        if context.survivors is not None:
            averager = SurvivingAverager(averager, context.survivors)
        self.synchroniser = Synchroniser(context, context.parameters, averager, config.outer)
        self.local_steps = config.local_steps
        self.round = 1
        self._steps_in_round = 0
        self._delayed = config.overlap.delay_rounds == 1
        self._keep = config.overlap.progress == "keep"
        self._eager = self._delayed and config.overlap.progress == "eager"
        self.consensus = not self._eager
        self._start: Tensors | None = None  # where it is not theta
        self._ended: Ended | None = None
        self._in_flight: tuple[Future[Finished], Ended] | None = None
        self._background = Background(context) if self._delayed else None
        low_rank = low_rank_options(config.compressor)
        self._control: RankControl | None = None
        if low_rank is not None and low_rank.adaptive:
            self._control = RankControl(low_rank, config.local_steps)

    def planned_step_bytes(self) -> int:
        """Nothing travels in a step; see the rounds."""
        return 0

    def planned_round_bytes(self) -> int:
        """What the averager will send."""
        return self.synchroniser.averager.planned_bytes(self.context.wan)

    @property
    def outer_parameters(self) -> Tensors:
        """theta; this replica's own under `eager`."""
        return {name: parameter.detach() for name, parameter in self.synchroniser.outer.theta.items()}

    def synchronises_after(self, step: int, *, last: bool) -> bool:
        """After `local_steps` steps of a round, and after the last step of all."""
        self._steps_in_round += 1
        return last or self._steps_in_round >= self.local_steps

    def close_round(self, step: int) -> None:
        """Without delay: exchange, wait, step. With it: apply the previous round's exchange."""
        with torch.no_grad():
            start = self._start or self.outer_parameters
            delta = {name: start[name] - p for name, p in self.context.parameters.items()}
        ended = Ended(self.round, self._steps_in_round, delta)
        self.round += 1
        self._steps_in_round = 0
        if self._delayed:
            self._settle(step, ended)
            self._ended = ended
            return
        finished = self.synchroniser.exchange(delta, ended.number, ended.local_steps, self.context.ledger)
        self.synchroniser.apply(finished, step, exposed_comm_s=finished.comm_s, choose_next=self._choose_next)
        copy_into(self.context.parameters, self.outer_parameters)

    def open_round(self) -> None:
        """Launch the exchange of the round that ended, if it overlaps, and set where the next one starts."""
        theta = self.outer_parameters
        ended, self._ended = self._ended, None
        if ended is not None:
            self._launch(ended)
            if self._keep:
                self._start = {name: theta[name] - ended.delta[name] for name in theta}
        copy_into(self.context.parameters, self._start or theta)

    def drain(self, step: int) -> None:
        """Exchange and apply the last round; the model then holds theta."""
        if self._ended is not None:
            self._launch(self._ended)
            self._ended = None
            self._settle(step, None)
        copy_into(self.context.parameters, self.outer_parameters)
        if self._background is not None:
            self._background.close()

    def state_dict(self) -> State:
        """Shared parameters, averager, round, the ended round that `open_round` will send, rank control."""
        ended = self._ended
        kept = ended and {"number": ended.number, "local_steps": ended.local_steps, "delta": ended.delta}
        control = self._control.state_dict() if self._control else None
        return {
            **self.synchroniser.state_dict(),
            "local_steps": self.local_steps,
            "round": self.round,
            "ended": kept,
            "control": control,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        self.synchroniser.load_state_dict(state)
        self.local_steps, self.round = int(state["local_steps"]), int(state["round"])
        self._steps_in_round = 0
        kept = state["ended"]
        if kept is not None:
            delta = take_tensors("ended round", kept["delta"], self.context.parameters)
            self._ended = Ended(int(kept["number"]), int(kept["local_steps"]), delta)
        if self._control is not None:
            self._control.load_state_dict(state["control"])

    def begin_as_newcomer(self, state: Mapping[str, Any]) -> None:
        """theta, momentum, warm factors and schedule of a peer; nothing owed, and zero for the ended round."""
        self.load_state_dict(state)
        self.synchroniser.averager.forget()
        if self._ended is not None:
            nothing = {name: torch.zeros(shape) for name, shape in self.context.shapes.items()}
            self._ended = Ended(self._ended.number, self._ended.local_steps, nothing)
        copy_into(self.context.parameters, self.outer_parameters)

    def _launch(self, ended: Ended) -> None:
        if self._background is None:
            raise RuntimeError("an exchange without delay has no background to run in")
        synchroniser = self.synchroniser
        future = self._background.launch(
            lambda ledger: synchroniser.exchange(ended.delta, ended.number, ended.local_steps, ledger)
        )
        self._in_flight = (future, ended)

    def _settle(self, step: int, ended: Ended | None) -> None:
        """Apply what is in flight; under `eager` also the own share of the round that just ended."""
        share = self._eager_share(ended)
        if self._in_flight is None or self._background is None:
            if share is not None:
                self.synchroniser.outer.apply(share)
            return
        future, _ = self._in_flight
        finished, exposed_comm_s = self._background.wait(future)
        self._in_flight = None
        mean = finished.averaged.mean
        delta = None if share is None else {name: mean[name] + share[name] for name in mean}
        self.synchroniser.apply(
            finished, step, exposed_comm_s=exposed_comm_s, delta=delta, choose_next=self._choose_next
        )

    def _eager_share(self, ended: Ended | None) -> Tensors | None:
        """(delta_i(t) - delta_i(t-1)) / D, a round that is not there counting as zero."""
        if not self._eager:
            return None
        replicas = self.context.wan.size
        share = {name: torch.zeros(shape) for name, shape in self.context.shapes.items()}
        for round_, sign in ((ended, 1), (self._in_flight and self._in_flight[1], -1)):
            for name, delta in (round_.delta if round_ else {}).items():
                share[name] += sign * self.context.weight * delta / replicas
        return share

    def _choose_next(self, finished: Finished) -> tuple[int, int | None]:
        """Rank and H from the energy that this exchange captured on all stages together."""
        averager = self.synchroniser.averager
        if self._control is None or finished.rank_r is None:
            return self.local_steps, None
        energy = finished.averaged.energy
        own = torch.zeros(finished.rank_r + 1, dtype=torch.float64)
        if energy is not None:
            own[:-1], own[-1] = energy.columns, energy.total
        whole = torch.stack(self.context.lan.gather_float64(own, self.context.ledger)).sum(dim=0)
        effective = self._control.observe(whole[:-1], float(whole[-1]))
        if self._control.rank != averager.rank:
            averager.set_rank(self._control.rank)
        self.local_steps = self._control.local_steps
        return self.local_steps, effective
