"""Streaming DiLoCo: a fragment of the layers at a time, beside training."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from trainer.compression import build_averager
from trainer.method_config import StreamingDiLoCoConfig
from trainer.methods.base import Context, Method, copy_into
from trainer.methods.synchroniser import Background, Finished, Synchroniser
from trainer.model import parameter_hash
from trainer.state import State

Tensors = dict[str, Tensor]


def fragment_of(name: str, layers: int, fragment_layers: int) -> int:
    """Which fragment a parameter is in: its layer's; embeddings with the first, norm and head with the last.

    >>> [fragment_of(f"layers.{n}.w", 5, 2) for n in range(5)], fragment_of("lm_head.weight", 5, 2)
    ([0, 0, 1, 1, 2], 2)
    """
    parts = name.split(".")
    if parts[0] == "layers":
        return int(parts[1]) // fragment_layers
    return 0 if parts[0].startswith("embed") else (layers - 1) // fragment_layers


class StreamingDiLoCo(Method):
    """arXiv:2501.18512: every fragment of `fragment_layers` layers is synchronised every H steps, one
    fragment after the other, spread evenly over the H steps.

    A fragment's pseudo-gradient theta_p - x_p travels while `overlap_steps` (tau) further inner steps are
    taken. Then theta_p takes its outer step, and the local weights are merged:
    x_p <- alpha x_p + (1 - alpha) theta_p.

    Reconstruction: fragments are runs of neighbouring layers (the source prefers strided ones); the
    embeddings belong to the first, final norm and head to the last; at the end every fragment is
    exchanged once more, so that no replica's last steps are lost. A pipeline stage takes part in the
    exchanges of the fragments it holds layers of.
    """

    def __init__(self, config: StreamingDiLoCoConfig, context: Context) -> None:
        super().__init__(context)
        self._config = config
        self._count = config.fragments(context.layers)
        self._names: list[list[str]] = [[] for _ in range(self._count)]
        for name in context.parameters:
            self._names[fragment_of(name, context.layers, config.fragment_layers)].append(name)
        self._fragments: dict[int, Synchroniser] = {}
        for number, names in enumerate(self._names):
            if names:
                shapes = {name: context.shapes[name] for name in names}
                averager = build_averager(config.compressor, shapes, context.seed)
                held = {name: context.parameters[name] for name in names}
                self._fragments[number] = Synchroniser(context, held, averager, config.outer)
        self._background = Background(context)
        self._in_flight: tuple[int, Future[Finished]] | None = None
        self._step = 0
        self.round = 1

    def planned_step_bytes(self) -> int:
        """Nothing travels in a step; see the rounds."""
        return 0

    def planned_round_bytes(self) -> int:
        """Every fragment of this stage once."""
        wan = self.context.wan
        return sum(fragment.averager.planned_bytes(wan) for fragment in self._fragments.values())

    @property
    def outer_parameters(self) -> Tensors:
        """theta of all fragments, in the order of the model's parameters."""
        whole = {name: p.detach() for f in self._fragments.values() for name, p in f.outer.theta.items()}
        return {name: whole[name] for name in self.context.parameters}

    def synchronises_after(self, step: int, *, last: bool) -> bool:
        """Where any fragment is launched or applied, on whichever stage, and after the last step."""
        self._step += 1
        launched = self._launched_at(self._step)
        applied = self._launched_at(self._step - self._config.overlap_steps)
        return last or launched is not None or applied is not None

    def close_round(self, step: int) -> None:
        """Apply the fragment whose time has come, and merge."""
        if self._launched_at(self._step - self._config.overlap_steps) is not None:
            self._settle(step)

    def open_round(self) -> None:
        """Launch the fragment whose turn it is."""
        number = self._launched_at(self._step)
        if number is None or number not in self._fragments:
            return
        delta, fragment, round_ = self._delta(number), self._fragments[number], self.round
        self.round += 1
        local_steps = self._config.local_steps
        future = self._background.launch(lambda ledger: fragment.exchange(delta, round_, local_steps, ledger))
        self._in_flight = (number, future)

    def drain(self, step: int) -> None:
        """Finish what is under way, exchange every fragment once more; the model then holds theta."""
        self._settle(step)
        for number, fragment in self._fragments.items():
            finished = fragment.exchange(
                self._delta(number), self.round, self._config.local_steps, self.context.ledger
            )
            self.round += 1
            self._apply(number, finished, step, finished.comm_s)
        copy_into(self.context.parameters, self.outer_parameters)
        self._background.close()

    def state_dict(self) -> State:
        """Every fragment's theta, momentum and averager, and where in the schedule training is."""
        fragments = {str(number): fragment.state_dict() for number, fragment in self._fragments.items()}
        return {"fragments": fragments, "step": self._step, "round": self.round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        for number, fragment in self._fragments.items():
            fragment.load_state_dict(state["fragments"][str(number)])
        self._step, self.round = int(state["step"]), int(state["round"])

    def _launched_at(self, step: int) -> int | None:
        """The fragment launched at the end of this step: fragment p after (p + 1) H / P steps of each H."""
        if step < 1:
            return None
        steps, place = self._config.local_steps, (step - 1) % self._config.local_steps + 1
        places = {(number + 1) * steps // self._count: number for number in range(self._count)}
        return places.get(place)

    def _delta(self, number: int) -> Tensors:
        theta = self._fragments[number].outer.theta
        with torch.no_grad():
            return {name: theta[name].detach() - self.context.parameters[name] for name in theta}

    def _settle(self, step: int) -> None:
        if self._in_flight is None:
            return
        number, future = self._in_flight
        self._in_flight = None
        finished, exposed_comm_s = self._background.wait(future)
        self._apply(number, finished, step, exposed_comm_s)

    def _apply(self, number: int, finished: Finished, step: int, exposed_comm_s: float) -> None:
        fragment, alpha = self._fragments[number], self._config.merge_alpha
        fragment.apply(finished, step, exposed_comm_s=exposed_comm_s, outer_hash=self._hash)
        with torch.no_grad():
            for name, theta in fragment.outer.theta.items():
                self.context.parameters[name].mul_(alpha).add_(theta, alpha=1 - alpha)

    def _hash(self) -> str:
        return parameter_hash(self.outer_parameters)
