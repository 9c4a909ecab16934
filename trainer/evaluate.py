"""Validation loss of the current weights, through replica 0's pipeline."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.pipelining import ScheduleGPipe, ScheduleLoopedBFS

from trainer.metrics import EVALUATION, Ledger
from trainer.model import DecoderStage
from trainer.pipeline import counting_stages, token_loss
from trainer.ranks import World

EVALUATION_MICROBATCH = 8  # sequences; larger costs memory, smaller costs time


class Evaluator:
    """Forward-only pipeline over a fixed set of windows, tokens int64 or uint8 [n, seq_len + 1].

    Only replica 0 computes; everybody must call `loss` and be synchronised by the caller. Bytes moved
    here are in `sent_bytes` and in no training figure.
    """

    def __init__(self, pieces: list[DecoderStage], world: World, windows: Tensor, ledger: Ledger) -> None:
        self._is_first, self._is_last = pieces[0].is_first, pieces[-1].is_last
        self._inputs = windows[:, :-1].long()
        self._targets = windows[:, 1:].long()
        microbatch = math.gcd(len(windows), EVALUATION_MICROBATCH)
        self._chunks = len(windows) // microbatch
        self._stages = counting_stages(
            pieces,
            world,
            microbatch=microbatch,
            seq_len=self._inputs.shape[1],
            ledger=ledger,
            bucket=EVALUATION,
        )
        self._schedule: ScheduleGPipe | ScheduleLoopedBFS
        if len(pieces) == 1:
            self._schedule = ScheduleGPipe(
                self._stages[0], self._chunks, loss_fn=token_loss, scale_grads=False
            )
        else:
            self._schedule = ScheduleLoopedBFS(
                list(self._stages), self._chunks, loss_fn=token_loss, scale_grads=False
            )

    @property
    def sent_bytes(self) -> int:
        """Activation bytes handed to the LAN by evaluations."""
        return sum(stage.sent_bytes for stage in self._stages)

    @property
    def tokens(self) -> int:
        """Tokens that one evaluation predicts."""
        return self._targets.numel()

    def loss(self) -> float | None:
        """Mean nats per token on the last stage, None elsewhere."""
        losses: list[Tensor] | None = [] if self._is_last else None
        inputs = (self._inputs,) if self._is_first else ()
        with torch.no_grad():
            self._schedule.eval(*inputs, target=self._targets if self._is_last else None, losses=losses)
        return None if losses is None else float(torch.stack(losses).double().mean())


def bits_per_byte(nats_per_token: float) -> float:
    """Bits per byte where a token is a byte."""
    return nats_per_token / math.log(2)
