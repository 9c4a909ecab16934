"""Averages of named tensors over replicas through compressed exchanges."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.collectives import Exchange
from trainer.compression.codec import Codec, Key
from trainer.metrics import Ledger
from trainer.state import State, check_keys

Tensors = dict[str, Tensor]
TakeSent = Callable[[str, Tensor], None]
"""Is handed what this replica contributed of each tensor, once, before the next; may not keep or change it."""


def ignore_sent(name: str, sent: Tensor) -> None:
    """For callers that need only the mean."""


@dataclass(frozen=True)
class ColumnEnergy:
    """How much of the input the low-rank factors captured, for one stage.

    `columns` fp64 [rank]: mean over replicas of each factor column's squared norm, strongest first
    within each tensor, summed over tensors. `total`: mean over replicas of the input's squared norm.
    """

    columns: Tensor
    total: float


@dataclass(frozen=True)
class Averaged:
    """`mean` is what everybody applies, bit-identical on all replicas, in memory of its own.

    `relative_error` is |input - sent| / |input| over all tensors, 0 where the input is 0.
    """

    mean: Tensors
    relative_error: float
    energy: ColumnEnergy | None = None


class Averager(ABC):
    """Averages a fixed set of named fp32 tensors over the members of an exchange."""

    rank: int | None = None
    """Rank of the factors in use; None where there are none."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = dict(shapes)

    @abstractmethod
    def planned_bytes(self, exchange: Exchange) -> int:
        """What the next `average` will hand to the transport on this member, exactly."""

    @abstractmethod
    def average(
        self, tensors: Tensors, exchange: Exchange, ledger: Ledger, take_sent: TakeSent = ignore_sent
    ) -> Averaged:
        """Average over replicas; time outside the transport goes to the ledger's open span.

        Beside the mean, no more than single tensors and payloads are held at a time.

        Raises:
            CodecError: a tensor holds a value that cannot be sent; names the tensor.
            RuntimeError: the transport failed.
        """

    def state_dict(self) -> State:
        """Everything that outlives an `average`, for a resumed process; nothing here."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; the tensors are the averager's to keep.

        Raises:
            StateError: the state is of another averager.
        """
        check_keys("averager", set(state), set())

    def forget(self) -> None:  # noqa: B027 - most have nothing
        """Drop what this replica alone remembers; what all share stays."""

    def set_rank(self, rank: int) -> None:  # noqa: B027 - ignoring it is the right default
        """Use this rank from the next exchange on; averagers without factors ignore it."""


class ErrorMeter:
    """Adds up |input - sent|^2 and |input|^2 in fp64, tensor by tensor."""

    def __init__(self) -> None:
        self._error = self._size = 0.0

    def add(self, tensor: Tensor, sent: Tensor) -> None:
        """Take in one tensor and what was sent of it."""
        self._error += squared_norm(tensor - sent)
        self._size += squared_norm(tensor)

    @property
    def relative(self) -> float:
        """|input - sent| / |input|, 0 where the input is 0."""
        return math.sqrt(self._error / self._size) if self._size else 0.0


def squared_norm(tensor: Tensor) -> float:
    """Sum of squares, accumulated in fp64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


class MeanAverager(Averager):
    """Nothing compressed: the exact fp32 mean."""

    def planned_bytes(self, exchange: Exchange) -> int:
        """Two passes of shards; see `Exchange.planned_mean_bytes`."""
        return exchange.planned_mean_bytes(sum(s.numel() for s in self.shapes.values()), "fp32", "tuned")

    def average(
        self, tensors: Tensors, exchange: Exchange, ledger: Ledger, take_sent: TakeSent = ignore_sent
    ) -> Averaged:
        """See the base class."""
        flat = torch.cat([tensors[name].reshape(-1) for name in self.shapes])
        mean = exchange.mean(flat, "fp32", "tuned", ledger)
        pieces = torch.split(mean, [shape.numel() for shape in self.shapes.values()])
        named = {n: p.view(s) for (n, s), p in zip(self.shapes.items(), pieces, strict=True)}
        for name in self.shapes:
            take_sent(name, tensors[name])
        return Averaged(named, 0.0)


class CodecAverager(Averager):
    """One gather of encoded tensors, decoded and averaged in fp32 in rank order."""

    def __init__(self, shapes: Mapping[str, torch.Size], codec: Codec) -> None:
        super().__init__(shapes)
        self.codec = codec
        self._round = 0

    def state_dict(self) -> State:
        """How many exchanges there were: codecs that draw at random draw from it."""
        return {"round": self._round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        check_keys("averager", set(state), {"round"})
        self._round = int(state["round"])

    def planned_bytes(self, exchange: Exchange) -> int:
        """One payload with every tensor in it, to each of the others."""
        return exchange.planned_gather_bytes(sum(map(self.codec.nbytes, self.shapes.values())))

    def average(
        self, tensors: Tensors, exchange: Exchange, ledger: Ledger, take_sent: TakeSent = ignore_sent
    ) -> Averaged:
        """See the base class."""
        self._round += 1
        ordered = {name: tensors[name] for name in self.shapes}
        gathered = Gathered(self.codec, ordered, self._round, exchange, ledger)
        meter, mean = ErrorMeter(), {}
        for name, everybody in gathered.decoded():
            sent = everybody[exchange.index]
            meter.add(tensors[name], sent)
            take_sent(name, sent)
            mean[name] = mean_in_rank_order(everybody)
        return Averaged(mean, meter.relative)


class Gathered:
    """Encoded tensors of everybody, and `extra` bytes of everybody behind them."""

    def __init__(
        self,
        codec: Codec,
        tensors: Tensors,
        number: int,
        exchange: Exchange,
        ledger: Ledger,
        *,
        extra: Tensor | None = None,
    ) -> None:
        self._codec, self._number = codec, number
        self._shapes = {name: tensor.shape for name, tensor in tensors.items()}
        own = [codec.encode(tensor, Key(name, number)) for name, tensor in tensors.items()]
        self._encoded_bytes = sum(part.numel() for part in own)
        payload = torch.cat(own if extra is None else [*own, extra]) if own else torch.empty(0).byte()
        del own
        self._payloads = exchange.gather(payload, ledger)

    def decoded(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Tensor by tensor, everybody's in rank order; decoded as they are asked for."""
        start = 0
        for name, shape in self._shapes.items():
            end = start + self._codec.nbytes(shape)
            key = Key(name, self._number)
            yield name, [self._codec.decode(payload[start:end], shape, key) for payload in self._payloads]
            start = end

    def extras(self) -> list[Tensor]:
        """Everybody's extra bytes, in rank order."""
        return [payload[self._encoded_bytes :] for payload in self._payloads]


def mean_in_rank_order(tensors: list[Tensor]) -> Tensor:
    """fp32 mean, added up in the given order so that every replica gets the same bits."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total.div_(len(tensors))
