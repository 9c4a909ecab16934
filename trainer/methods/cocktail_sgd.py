"""CocktailSGD: random, then largest, then four bits, of how far a replica is from what all share."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from trainer.compression import build_averager
from trainer.method_config import CocktailSgdConfig
from trainer.methods.base import Context, Method, copy_into
from trainer.methods.synchroniser import Background, Finished, Synchroniser
from trainer.state import State, take_tensors

Tensors = dict[str, Tensor]


class CocktailSGD(Method):
    """CocktailSGD (Wang et al., ICML 2023): what travels is the compressed difference of the shared
    weights theta and the local ones x, one step late.

    At launch delta_i = theta - x_i. When the exchange is over, theta moves by the average, and x_i by the
    same and by what replica i has sent, C(delta_i): so theta - x_i is at any time exactly what replica i
    has not sent yet, and needs no error buffer of its own.

    Reconstruction: there is no server. Payloads are gathered and averaged by everybody, so nothing is
    compressed a second time and there is no server-side error. The last, drained exchange leaves unsent
    what it does not send.
    """

    def __init__(self, config: CocktailSgdConfig, context: Context) -> None:
        super().__init__(context)
        averager = build_averager(config.compressor, context.shapes, context.seed)
        self.synchroniser = Synchroniser(context, context.parameters, averager, config.outer)
        self._local_steps = config.local_steps
        self._background = Background(context) if config.delay_rounds else None
        self._pending: Tensors | None = None
        self._pending_steps = 0
        self._sent: Tensors = {}
        self._in_flight: Future[Finished] | None = None
        self.round = 1
        self._steps_in_round = 0

    def planned_step_bytes(self) -> int:
        """Nothing travels in a step; see the rounds."""
        return 0

    def planned_round_bytes(self) -> int:
        """What the averager will send."""
        return self.synchroniser.averager.planned_bytes(self.context.wan)

    @property
    def outer_parameters(self) -> Tensors:
        """theta."""
        return {name: parameter.detach() for name, parameter in self.synchroniser.outer.theta.items()}

    def synchronises_after(self, step: int, *, last: bool) -> bool:
        """After `local_steps` steps, and after the last."""
        self._steps_in_round += 1
        return last or self._steps_in_round >= self._local_steps

    def close_round(self, step: int) -> None:
        """Apply the exchange that is due, and take the difference that comes next."""
        if self._in_flight is not None and self._background is not None:
            finished, exposed_comm_s = self._background.wait(self._in_flight)
            self._in_flight = None
            self._apply(finished, step, exposed_comm_s)
        theta = self.outer_parameters
        self._pending = {name: theta[name] - p.detach() for name, p in self.context.parameters.items()}
        self._pending_steps, self._steps_in_round = self._steps_in_round, 0
        if self._background is None:
            self._send_and_apply(step)

    def open_round(self) -> None:
        """Launch the exchange of the difference taken last."""
        if self._pending is None or self._background is None:
            return
        delta, number, steps = self._pending, self.round, self._pending_steps
        self._pending = None
        self.round += 1
        self._in_flight = self._background.launch(
            lambda ledger: self.synchroniser.exchange(delta, number, steps, ledger, self._sent.__setitem__)
        )

    def drain(self, step: int) -> None:
        """Exchange and apply the last difference; the model then holds theta."""
        self._send_and_apply(step)
        copy_into(self.context.parameters, self.outer_parameters)
        if self._background is not None:
            self._background.close()

    def state_dict(self) -> State:
        """theta, averager, the difference to be sent and the number of the next round."""
        pending = None if self._pending is None else dict(self._pending)
        return {
            **self.synchroniser.state_dict(),
            "pending": pending,
            "pending_steps": self._pending_steps,
            "round": self.round,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        self.synchroniser.load_state_dict(state)
        self._pending = None
        if state["pending"] is not None:
            self._pending = take_tensors("pending difference", state["pending"], self.context.shapes)
        self._pending_steps, self.round = int(state["pending_steps"]), int(state["round"])
        self._steps_in_round = 0

    def _send_and_apply(self, step: int) -> None:
        if self._pending is None:
            return
        delta, self._pending = self._pending, None
        finished = self.synchroniser.exchange(
            delta, self.round, self._pending_steps, self.context.ledger, self._sent.__setitem__
        )
        self.round += 1
        self._apply(finished, step, finished.comm_s)

    def _apply(self, finished: Finished, step: int, exposed_comm_s: float) -> None:
        before = {name: theta.clone() for name, theta in self.outer_parameters.items()}
        self.synchroniser.apply(finished, step, exposed_comm_s=exposed_comm_s)
        with torch.no_grad():
            for name, theta in self.outer_parameters.items():
                self.context.parameters[name].add_(
                    self._sent[name] / self.context.weight + (theta - before[name])
                )
