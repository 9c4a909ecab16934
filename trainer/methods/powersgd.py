"""PowerSGD by torch's own hook: low-rank gradients in every step, as a baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_powersgd

from trainer.method_config import PowerSgdConfig
from trainer.methods.base import Context, Method
from trainer.methods.buckets import Bucket, cut_into_buckets
from trainer.state import State


class PowerSGD(Method):
    """arXiv:1905.13727 as torch.distributed implements it (`powerSGD_hook`), called as DDP would call it.

    All gradients of a stage are one DDP bucket. Steps before `start_iter` average dense gradients with
    gloo's all-reduce, later ones send low-rank factors, and tensors that would not shrink enough dense.
    The hook's own collectives are gloo's all-reduce, which is slow over a long fat pipe, and run after
    backward. Its sums are counted like `allreduce` with `collective: naive`.

    Differs from DDP: no overlap of buckets with backward. Columns are divided by their norm + 1e-8, as
    the hook suggests where a gradient may vanish.
    """

    def __init__(self, config: PowerSgdConfig, context: Context) -> None:
        super().__init__(context)
        self._config = config
        (self._bucket,) = cut_into_buckets(context.parameters, None)
        self._hook = torch_powersgd.PowerSGDState(
            process_group=CountingGroup(context.wan.group, self._sum),
            matrix_approximation_rank=config.rank,
            start_powerSGD_iter=config.start_iter,
            min_compression_rate=config.min_compression_rate,
            use_error_feedback=config.error_feedback,
            orthogonalization_epsilon=1e-8,
            random_seed=context.seed % 2**32,
        )

    def planned_step_bytes(self) -> int:
        """Dense before `start_iter`; then the dense rest, the factors P and the factors Q."""
        if self._hook.iter < self._config.start_iter:
            return self._planned(self._bucket.numel)
        return self.steady_step_bytes()

    def steady_step_bytes(self) -> int:
        """From `start_iter` on."""
        rest = left = right = 0
        for parameter in self._bucket.parameters:
            rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
            rank = min(rows, columns, self._config.rank)
            if (rows + columns) * rank * self._config.min_compression_rate < rows * columns:
                left, right = left + rows * rank, right + columns * rank
            else:
                rest += parameter.numel()
        return sum(self._planned(numel) for numel in (rest, left, right))

    def average_gradients(self) -> None:
        """Gradient <- the hook's decompressed mean."""
        if self.context.wan.size == 1:
            return
        with self.context.ledger.span("compress_s"):
            handed = HandedBucket(self._bucket, self.context.weight)
            mean = torch_powersgd.powerSGD_hook(self._hook, cast(Any, handed)).wait()
            self._bucket.scatter(mean)

    def synchronises_after(self, step: int, *, last: bool) -> bool:
        """After every step: replicas never differ."""
        return True

    def state_dict(self) -> State:
        """How many steps the hook saw, its error and its warm factors."""
        hook = self._hook
        tensors = {"error": hook.error_dict, "p": hook.p_memory_dict, "q": hook.q_memory_dict}
        return {"iter": hook.iter, **{name: held[0] for name, held in tensors.items() if 0 in held}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        hook = self._hook
        hook.iter = int(state["iter"])
        for name, held in (
            ("error", hook.error_dict),
            ("p", hook.p_memory_dict),
            ("q", hook.q_memory_dict),
        ):
            if name in state:
                held[0] = state[name]

    def _planned(self, numel: int) -> int:
        return self.context.wan.planned_mean_bytes(numel, "fp32", "naive")

    def _sum(self, tensors: list[Tensor], start: Callable[[], dist.Work]) -> dist.Work:
        """One all-reduce of the hook, counted, waited for and booked as such."""
        wan = self.context.wan
        with self.context.ledger.span(wan.bucket):
            wan.count(sum(self._planned(tensor.numel()) for tensor in tensors))
            work = start()
            work.wait()
        return work


class HandedBucket:
    """What the hook asks of DDP's GradBucket; `gradients` are views of `buffer`."""

    def __init__(self, bucket: Bucket, weight: float) -> None:
        self._flat = bucket.flatten(weight)
        pieces = torch.split(self._flat, bucket.sizes)
        self._views = [piece.view_as(p) for piece, p in zip(pieces, bucket.parameters, strict=True)]

    def buffer(self) -> Tensor:
        """All gradients, flat."""
        return self._flat

    def gradients(self) -> list[Tensor]:
        """One view for each parameter."""
        return self._views

    def index(self) -> int:
        """There is one bucket."""
        return 0

    def is_last(self) -> bool:
        """There is one bucket."""
        return True


class CountingGroup(dist.ProcessGroup):
    """A process group whose all-reduces go through `run(tensors, start)`."""

    def __init__(
        self, group: dist.ProcessGroup, run: Callable[[list[Tensor], Callable[[], dist.Work]], dist.Work]
    ) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group, self._run = group, run

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        """torch's `all_reduce` calls this."""
        return self._run(tensors, lambda: self._group.allreduce(tensors, opts))
