"""NoLoCo: no all-reduce; random pairs gossip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.compression import Averager, build_averager
from trainer.compression.averagers import MeanAverager
from trainer.method_config import NoLoCoConfig
from trainer.methods.base import Context, Method, copy_into
from trainer.methods.pairs import PairExchange, partner_in_round
from trainer.methods.synchroniser import Finished, report, timed_average
from trainer.model import parameter_hash
from trainer.state import State, take_tensors

Tensors = dict[str, Tensor]


class NoLoCo(Method):
    """arXiv:2506.10911: after H local steps, replica i and a random partner j exchange pseudo-gradients
    and slow weights phi, and each takes a step of modified Nesterov momentum:

        v_i <- momentum v_i - lr mean(delta_i, delta_j) - gossip (phi_i - mean(phi_i, phi_j))
        phi_i <- phi_i + v_i

    The third term pulls partners together in place of a global average. It sums to zero over a pair, so
    (every replica having a partner) the mean over replicas of phi moves exactly as DiLoCo with this
    momentum would move it: gossip neither creates nor destroys. There is no consensus; what is evaluated
    is replica 0's phi.

    Reconstruction: `gossip` (the source's gamma, in a range for which it shows that the spread of weights
    stays bounded) is 1; partners are a seeded permutation in each round, the odd one out is alone with
    itself; the source's random routing of activations between pipelines is not here. `compressor` is for
    the pseudo-gradients, slow weights travel in fp32.
    """

    consensus = False

    def __init__(self, config: NoLoCoConfig, context: Context) -> None:
        super().__init__(context)
        self._config = config
        self._averager = build_averager(config.compressor, context.shapes, context.seed)
        self._slow_averager = MeanAverager(context.shapes)
        self._slow = {name: p.detach().clone() for name, p in context.parameters.items()}
        self._velocity = {name: torch.zeros(shape) for name, shape in context.shapes.items()}
        self.round = 1
        self._steps_in_round = 0

    def planned_step_bytes(self) -> int:
        """Nothing travels in a step; see the rounds."""
        return 0

    def planned_round_bytes(self) -> int:
        """Pseudo-gradient and slow weights to one partner; to nobody for the odd one out."""
        pair = self._pair(self.round)
        if pair is None:
            return 0
        return self._averager.planned_bytes(pair) + self._slow_averager.planned_bytes(pair)

    @property
    def outer_parameters(self) -> Tensors:
        """phi, this replica's own."""
        return dict(self._slow)

    def synchronises_after(self, step: int, *, last: bool) -> bool:
        """After `local_steps` steps of a round, and after the last step of all."""
        self._steps_in_round += 1
        return last or self._steps_in_round >= self._config.local_steps

    def close_round(self, step: int) -> None:
        """Meet the partner, move phi; the model then holds phi."""
        delta = {name: self._slow[name] - p.detach() for name, p in self.context.parameters.items()}
        pair = self._pair(self.round)
        if pair is None:
            self._move(delta, self._slow)
        else:
            finished, slow = self._meet(pair, delta)
            self._move(finished.averaged.mean, slow.averaged.mean)
            both = Finished(
                finished.round,
                finished.local_steps,
                finished.averaged,
                finished.rank_r,
                compress_s=finished.compress_s + slow.compress_s,
                comm_s=finished.comm_s + slow.comm_s,
                payload_bytes=finished.payload_bytes + slow.payload_bytes,
                planned_bytes=finished.planned_bytes + slow.planned_bytes,
                delta_norm=finished.delta_norm,
            )
            report(
                self.context,
                both,
                step,
                exposed_comm_s=both.comm_s,
                next_local_steps=self._config.local_steps,
                outer_lr=self._config.lr,
                outer_hash=parameter_hash(self._slow),
            )
        self.round += 1
        self._steps_in_round = 0
        copy_into(self.context.parameters, self._slow)

    def state_dict(self) -> State:
        """phi, velocity, the averager's state and the number of the next round."""
        return {
            "slow": dict(self._slow),
            "velocity": dict(self._velocity),
            "averager": self._averager.state_dict(),
            "round": self.round,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        self._slow = take_tensors("slow weights", state["slow"], self.context.shapes)
        self._velocity = take_tensors("velocity", state["velocity"], self.context.shapes)
        self._averager.load_state_dict(state["averager"])
        self.round, self._steps_in_round = int(state["round"]), 0

    def _pair(self, number: int) -> PairExchange | None:
        wan = self.context.wan
        partner = partner_in_round(wan.index, wan.size, number, self.context.seed)
        return None if partner == wan.index else PairExchange(wan, partner)

    def _meet(self, pair: PairExchange, delta: Tensors) -> tuple[Finished, Finished]:
        def average(averager: Averager, tensors: Tensors) -> Finished:
            return timed_average(
                averager,
                pair,
                tensors,
                self.context.ledger,
                rank=self.context.rank,
                number=self.round,
                local_steps=self._steps_in_round,
            )

        return average(self._averager, delta), average(self._slow_averager, self._slow)

    def _move(self, delta: Tensors, slow: Tensors) -> None:
        config = self._config
        for name, phi in self._slow.items():
            pull = config.gossip * (phi - slow[name])
            self._velocity[name] = config.momentum * self._velocity[name] - config.lr * delta[name] - pull
        self._slow = {name: phi + self._velocity[name] for name, phi in self._slow.items()}
