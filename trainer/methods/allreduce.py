"""The baseline: replicas average their gradients in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from trainer.method_config import AllReduceConfig
from trainer.methods.base import Context, Method
from trainer.methods.buckets import BucketQueue, cut_into_buckets, gradient
from trainer.metrics import Ledger
from trainer.state import State, check_keys


class AllReduce(Method):
    """Data-parallel training: gradients travel in buckets, each one flat tensor.

    `accumulate: A`: gradients of A steps' batches are averaged, and exchange and inner step happen after
    the A-th (after the last step with what there is), at that step's learning rate. Every step's tokens
    count once, as ever.

    `overlap: true`: a bucket is handed over in the backward pass, as soon as the last microbatch has
    added to each of its gradients, and travels in the background while backward goes on. Buckets travel
    in one fixed order, so results are the same bits as without overlap. Under paced compute the hand-over
    waits until as much of the chunk's pace has passed as the chunk has finished gradients.
    """

    def __init__(self, config: AllReduceConfig, context: Context) -> None:
        super().__init__(context)
        self.config = config
        bucket_mb = config.bucket_mb or (25.0 if config.overlap else None)
        self._buckets = cut_into_buckets(context.parameters, bucket_mb)
        self._batches = 0
        self._queue: BucketQueue | None = None
        if config.overlap and context.wan.size > 1:
            self._queue = BucketQueue(context, self._buckets, self._mean)
            for bucket in self._buckets:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(self._count)  # type: ignore[no-untyped-call]
        self._additions: dict[nn.Parameter, int] = {}

    def planned_step_bytes(self) -> int:
        """See `Exchange.planned_mean_bytes`."""
        wan, config = self.context.wan, self.config
        return sum(wan.planned_mean_bytes(b.numel, config.wire, config.collective) for b in self._buckets)

    def updates_after(self, step: int, *, last: bool) -> bool:
        """After every `accumulate`-th step, and after the last."""
        self._batches += 1
        return last or self._batches == self.config.accumulate

    def average_gradients(self) -> None:
        """Gradient <- mean over the replicas and accumulated batches, the same bits everywhere."""
        context, scale = self.context, 1 / self._batches
        self._batches = 0
        self._additions.clear()
        if context.wan.size == 1:
            for parameter in context.parameters.values():
                gradient(parameter).mul_(scale)
            return
        if self._queue is not None:
            self._queue.hand_over_rest(scale * context.weight)
        for number, bucket in enumerate(self._buckets):
            if self._queue is not None:
                bucket.scatter(self._queue.take(number))
            else:
                bucket.scatter(self._mean(bucket.flatten(scale * context.weight), context.ledger))

    def synchronises_after(self, step: int, *, last: bool) -> bool:
        """After every update: replicas never differ then, and no gradient waits for its step."""
        return self._batches == 0

    def drain(self, step: int) -> None:
        """Nothing is in flight; end the background thread."""
        if self._queue is not None:
            self._queue.close()

    def state_dict(self) -> State:
        """Nothing outlives an update."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `state_dict`."""
        check_keys("allreduce", set(state), set())

    def _mean(self, flat: Tensor, ledger: Ledger) -> Tensor:
        return self.context.wan.mean(flat, self.config.wire, self.config.collective, ledger)

    def _count(self, parameter: Tensor) -> None:
        """After each addition to a gradient, in the thread that runs backward."""
        if self._queue is None or not isinstance(parameter, nn.Parameter):
            return
        additions = self._additions.get(parameter, 0) + 1
        self._additions[parameter] = additions
        if additions == self.context.microbatches * self.config.accumulate:
            self.context.computed(parameter.numel())
            self._queue.finished(parameter, self.context.weight / self.config.accumulate)
