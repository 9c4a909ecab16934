"""torch's pipeline schedules, with every byte counted, every chunk timed and, if asked, paced.

Gradients of the schedules equal a single process's when the loss is scaled here (`scale_grads=False`).
Shapes are static and told to each stage, so torch's negotiation, which would pickle objects over the
wire, never runs: `CountingStage` refuses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from trainer.config import PacedCompute, TrainerConfig
from trainer.metrics import Ledger
from trainer.model import DecoderStage
from trainer.ranks import World

FORWARD_SHARE, BACKWARD_SHARE = 1 / 3, 2 / 3  # backward computes two products for each of forward's
OVERRUN = 1.05  # a paced step is overrun when its chunks took 5 % longer than their slots


class Pacer:
    """Stretches each chunk to its share of the step, so that pacing happens before results move on.

    A whole step of `microbatches` over `stages` takes (microbatches + stages - 1) slots in 1F1B and
    GPipe alike, and (microbatches + (stages - 1) / pieces) where each rank holds several `pieces` of the
    model (arXiv:2104.04473, section 2.2). A chunk is one microbatch through one piece; one that ran over
    its share takes the excess from the next chunks of the same step.
    """

    def __init__(self, step_s: float, microbatches: int, stages: int, pieces: int = 1) -> None:
        self.slot_s = step_s / (microbatches + (stages - 1) / pieces)
        self.pace_s = self.slot_s * microbatches
        self.chunk_s = self.slot_s / pieces
        self.overran_steps = 0
        self._behind_s = 0.0
        self._spent_s = 0.0
        self._started = self._chunk_s = 0.0
        self._to_compute = self._computed = 0

    @classmethod
    def of(cls, config: TrainerConfig, rank: int = 0) -> Pacer | None:
        """The pacer a configuration asks for on a rank, None with real compute."""
        if not isinstance(config.compute, PacedCompute):
            return None
        parallel = config.parallel
        factor = config.compute.pace[rank] if config.compute.pace else 1.0
        return cls(config.compute.step_s * factor, parallel.microbatches, parallel.stages, parallel.pieces)

    def begin_step(self) -> None:
        """Forget what the last step owed."""
        self._behind_s = self._spent_s = 0.0

    def charge(self, spent_s: float) -> None:
        """Take time that was computed outside a chunk, the loss, from the step's next chunk."""
        self._behind_s += spent_s
        self._spent_s += spent_s

    def begin_chunk(self, started: float, share: float, to_compute: int) -> None:
        """A chunk began at `started` (perf_counter); if backward, it will compute that many gradients."""
        self._started, self._chunk_s = started, self.slot_s * share - self._behind_s
        self._to_compute, self._computed = to_compute, 0

    def computed(self, numel: int) -> None:
        """Gradients are final: sleep until as much of the chunk's time has passed as it has computed."""
        self._computed += numel
        due = self._started + self._chunk_s * min(self._computed / self._to_compute, 1.0)
        wait_s = due - time.perf_counter()
        if wait_s > 0:
            time.sleep(wait_s)

    def finish_chunk(self, started: float, share: float) -> None:
        """Sleep until the chunk that began at `started` (perf_counter) has used its share."""
        due = self.chunk_s * share
        wait_s = due - self._behind_s - (time.perf_counter() - started)
        if wait_s > 0:
            time.sleep(wait_s)
        spent = time.perf_counter() - started
        self._behind_s += spent - due
        self._spent_s += spent

    def end_step(self) -> None:
        """Count the step if its chunks overran their pace."""
        self.overran_steps += self._spent_s > self.pace_s * OVERRUN


class CountingStage(PipelineStage):
    """A pipeline stage that counts the bytes of its sends and times its chunks."""

    def __init__(
        self,
        module: DecoderStage,
        world: World,
        index: int,
        count: int,
        *,
        microbatch: int,
        seq_len: int,
        ledger: Ledger,
        bucket: str,
        pacer: Pacer | None = None,
    ) -> None:
        shape = module.shape
        with torch.device("meta"):
            tokens = torch.empty(microbatch, seq_len, dtype=torch.int64)
            activations = torch.empty(microbatch, seq_len, shape.dim, requires_grad=True)
            logits = torch.empty(microbatch, seq_len, shape.vocab, requires_grad=True)
        super().__init__(
            module,
            index,
            count,
            torch.device("cpu"),
            input_args=(tokens if module.is_first else activations,),
            output_args=(logits if module.is_last else activations,),
            group=world.pipeline,
        )
        self.sent_bytes = 0
        self._ledger, self._bucket, self._pacer = ledger, bucket, pacer
        self._gradients = sum(parameter.numel() for parameter in module.parameters())

    def _send_meta(self, meta: Any, dst_stage: int) -> NoReturn:
        raise RuntimeError("the pipeline's shapes are static: nothing is pickled onto the wire")

    def _recv_meta(self, src_stage: int) -> NoReturn:
        raise RuntimeError("the pipeline's shapes are static: nothing is unpickled from the wire")

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)  # everybody is static by construction: no vote on the wire

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Activation sends of one microbatch, counted."""
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Gradient sends of one microbatch, counted."""
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self.sent_bytes += sum(op.tensor.nbytes for op in ops)
        return ops

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of one microbatch, timed and paced."""
        return self._chunk(super().forward_one_chunk, FORWARD_SHARE, args, kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Backward of one microbatch, timed and paced."""
        if not self.has_backward:
            return None
        return self._chunk(super().backward_one_chunk, BACKWARD_SHARE, args, kwargs)

    def _chunk(
        self, run: Callable[..., Any], share: float, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._ledger.span(self._bucket):
            started = time.perf_counter()
            if self._pacer is not None:
                self._pacer.begin_chunk(started, share, self._gradients)
            result = run(*args, **kwargs)
            if self._pacer is not None:
                self._pacer.finish_chunk(started, share)
            return result


def counting_stages(
    pieces: list[DecoderStage], world: World, *, microbatch: int, seq_len: int, **counting: Any
) -> list[CountingStage]:
    """A stage for each piece that this rank holds; `counting` as for `CountingStage`."""
    count = world.stages * len(pieces)
    return [
        CountingStage(
            piece,
            world,
            world.stage + number * world.stages,
            count,
            microbatch=microbatch,
            seq_len=seq_len,
            **counting,
        )
        for number, piece in enumerate(pieces)
    ]


class Pipeline:
    """One replica's training schedule over the pieces of the model that this rank holds."""

    def __init__(
        self, pieces: list[DecoderStage], world: World, config: TrainerConfig, ledger: Ledger
    ) -> None:
        self.is_first, self.is_last = pieces[0].is_first, pieces[-1].is_last
        self.microbatches = config.parallel.microbatches
        self.pacer = Pacer.of(config, world.rank)
        self._ledger = ledger
        self._stages = counting_stages(
            pieces,
            world,
            microbatch=config.microbatch_size(world.replica),
            seq_len=config.data.seq_len,
            ledger=ledger,
            bucket="compute_s",
            pacer=self.pacer,
        )
        common: dict[str, Any] = {"loss_fn": self._training_loss, "scale_grads": False}
        self._schedule: Any
        if config.parallel.schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(list(self._stages), self.microbatches, **common)
        else:
            schedule = Schedule1F1B if config.parallel.schedule == "1f1b" else ScheduleGPipe
            self._schedule = schedule(self._stages[0], self.microbatches, **common)

    @property
    def sent_bytes(self) -> int:
        """Activation and gradient bytes handed to the LAN by training steps."""
        return sum(stage.sent_bytes for stage in self._stages)

    def computed(self, numel: int) -> None:
        """In a backward pass: so many gradients are final, and may be handed over at the pace of compute."""
        if self.pacer is not None:
            self.pacer.computed(numel)

    def step(self, tokens: Tensor) -> float | None:
        """Forward and backward of uint8 or int64 tokens [batch, seq_len + 1]; gradients add up.

        Returns the batch's mean loss in nats per token on the last stage, else None.
        """
        tokens = tokens.long()
        inputs = (tokens[:, :-1].contiguous(),) if self.is_first else ()
        target = tokens[:, 1:].contiguous() if self.is_last else None
        losses: list[Tensor] | None = [] if self.is_last else None
        if self.pacer is not None:
            self.pacer.begin_step()
        with self._ledger.span("bubble_s"):
            self._schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        if self.pacer is not None:
            self.pacer.end_step()
        return None if losses is None else float(torch.stack(losses).detach().double().sum())

    def _training_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        with self._ledger.span("compute_s"):
            started = time.perf_counter()
            loss = token_loss(logits, target) / self.microbatches
            if self.pacer is not None:
                self.pacer.charge(time.perf_counter() - started)
            return loss


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token: logits [batch, seq, vocab], target int64 [batch, seq]."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
