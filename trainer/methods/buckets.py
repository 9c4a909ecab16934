"""Gradients in flat buckets, and a queue that exchanges them in order beside the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from trainer.methods.base import Context
from trainer.metrics import Ledger

MEBIBYTE = 2**20


class Bucket:
    """The gradients of some parameters as one flat fp32 tensor."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.sizes = [parameter.numel() for parameter in parameters]
        self.numel = sum(self.sizes)

    def flatten(self, scale: float) -> Tensor:
        """A copy of all gradients times `scale`, fp32 [numel]."""
        flat = torch.cat([gradient(parameter).reshape(-1) for parameter in self.parameters])
        return flat if scale == 1 else flat.mul_(scale)

    def scatter(self, flat: Tensor) -> None:
        """Gradients <- flat [numel]."""
        for parameter, piece in zip(self.parameters, torch.split(flat, self.sizes), strict=True):
            gradient(parameter).copy_(piece.view_as(parameter))


def cut_into_buckets(parameters: Mapping[str, nn.Parameter], bucket_mb: float | None) -> list[Bucket]:
    """Parameters from last to first, as backward finishes them, in buckets of about `bucket_mb` MiB.

    A bucket is closed once it has reached that size; None means one bucket for all.
    """
    buckets: list[Bucket] = []
    gathered: list[nn.Parameter] = []
    for parameter in reversed(list(parameters.values())):
        gathered.append(parameter)
        if bucket_mb is not None and sum(p.nbytes for p in gathered) >= bucket_mb * MEBIBYTE:
            buckets.append(Bucket(gathered))
            gathered = []
    return [*buckets, Bucket(gathered)] if gathered else buckets


def gradient(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient; raises RuntimeError where there is none."""
    if parameter.grad is None:
        raise RuntimeError("every parameter has a gradient after a backward pass")
    return parameter.grad


class BucketQueue:
    """Exchanges buckets one after the other, in their order, in a background thread."""

    def __init__(
        self, context: Context, buckets: list[Bucket], mean: Callable[[Tensor, Ledger], Tensor]
    ) -> None:
        self._context, self._buckets, self._mean = context, buckets, mean
        self._bucket_of = {p: number for number, bucket in enumerate(buckets) for p in bucket.parameters}
        self._missing = [len(bucket.parameters) for bucket in buckets]
        self._futures: list[Future[Tensor]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradients")

    def finished(self, parameter: nn.Parameter, scale: float) -> None:
        """A gradient is complete: hand over what is now due, never a bucket before the one in front of it."""
        self._missing[self._bucket_of[parameter]] -= 1
        while len(self._futures) < len(self._buckets) and self._missing[len(self._futures)] == 0:
            self._hand_over(scale)

    def hand_over_rest(self, scale: float) -> None:
        """Hand over every bucket that is not yet on its way."""
        while len(self._futures) < len(self._buckets):
            self._hand_over(scale)

    def take(self, number: int) -> Tensor:
        """The mean of bucket `number`; waiting for it is exposed communication."""
        with self._context.ledger.span(self._context.wan.bucket):
            mean = self._futures[number].result()
        if number == len(self._buckets) - 1:
            self._futures = []
            self._missing = [len(bucket.parameters) for bucket in self._buckets]
        return mean

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _hand_over(self, scale: float) -> None:
        with self._context.ledger.span("compress_s"):
            flat = self._buckets[len(self._futures)].flatten(scale)

        def run() -> Tensor:
            torch.set_num_threads(1)  # a thread does not inherit it everywhere
            return self._mean(flat, Ledger("compress_s"))

        self._futures.append(self._thread.submit(run))
