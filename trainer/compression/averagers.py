"""Averages of named tensors over replicas through compressed exchanges; error feedback wraps any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.collectives import Exchange
from trainer.compression.quantisers import Quantiser
from trainer.metrics import Ledger
from trainer.state import State, check_keys, take_tensors

Tensors = dict[str, Tensor]


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
    """`mean` is what everybody applies, bit-identical; `sent` is what this replica contributed to it.

    `relative_error` is |input - sent| / |input| over all tensors, 0 where the input is 0.
    """

    mean: Tensors
    sent: Tensors
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
    def average(self, tensors: Tensors, exchange: Exchange, ledger: Ledger) -> Averaged:
        """Average over replicas; time outside the transport goes to the ledger's open span.

        Raises:
            QuantisationError: a tensor holds a value that cannot be sent.
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

    def set_rank(self, rank: int) -> None:  # noqa: B027 - ignoring it is the right default
        """Use this rank from the next exchange on; averagers without factors ignore it."""


def relative_error(tensors: Tensors, sent: Tensors) -> float:
    """|tensors - sent| / |tensors| over all of them, 0 where the input is 0."""
    error = sum(float((tensors[name] - sent[name]).double().square().sum()) for name in tensors)
    size = sum(float(tensor.double().square().sum()) for tensor in tensors.values())
    return float((error / size) ** 0.5) if size else 0.0


class MeanAverager(Averager):
    """Nothing compressed: the exact fp32 mean."""

    def planned_bytes(self, exchange: Exchange) -> int:
        """Two passes of shards; see `Exchange.planned_mean_bytes`."""
        return exchange.planned_mean_bytes(sum(s.numel() for s in self.shapes.values()), "fp32", "tuned")

    def average(self, tensors: Tensors, exchange: Exchange, ledger: Ledger) -> Averaged:
        """See the base class."""
        flat = torch.cat([tensors[name].reshape(-1) for name in self.shapes])
        mean = exchange.mean(flat, "fp32", "tuned", ledger)
        pieces = torch.split(mean, [shape.numel() for shape in self.shapes.values()])
        named = {n: p.view(s) for (n, s), p in zip(self.shapes.items(), pieces, strict=True)}
        return Averaged(named, tensors, 0.0)


class QuantisedAverager(Averager):
    """One gather of quantised tensors, averaged in fp32 in rank order."""

    def __init__(self, shapes: Mapping[str, torch.Size], quantiser: Quantiser) -> None:
        super().__init__(shapes)
        self.quantiser = quantiser

    def planned_bytes(self, exchange: Exchange) -> int:
        """One payload with every tensor in it, to each of the others."""
        return exchange.planned_gather_bytes(sum(map(self.quantiser.nbytes, self.shapes.values())))

    def average(self, tensors: Tensors, exchange: Exchange, ledger: Ledger) -> Averaged:
        """See the base class."""
        payload = torch.cat([self.quantiser.compress(tensors[name], name) for name in self.shapes])
        decoded = [self._unpack(p) for p in exchange.gather(payload, ledger)]
        sent = decoded[exchange.index]
        mean = {name: mean_in_rank_order([tensors[name] for tensors in decoded]) for name in self.shapes}
        return Averaged(mean, sent, relative_error(tensors, sent))

    def _unpack(self, payload: Tensor) -> Tensors:
        pieces = torch.split(payload, [self.quantiser.nbytes(shape) for shape in self.shapes.values()])
        named = zip(self.shapes.items(), pieces, strict=True)
        return {name: self.quantiser.decompress(piece, shape) for (name, shape), piece in named}


def mean_in_rank_order(tensors: list[Tensor]) -> Tensor:
    """fp32 mean, added up in the given order so that every replica gets the same bits."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)


class ErrorFeedback(Averager):
    """Sends input + residual and keeps what was not sent as the next residual (arXiv:1901.09847).

    Invariant: sent + residual = input + previous residual, to fp32 rounding.
    """

    def __init__(self, inner: Averager) -> None:
        super().__init__(inner.shapes)
        self.inner = inner
        self.residual: Tensors = {name: torch.zeros(shape) for name, shape in inner.shapes.items()}

    def state_dict(self) -> State:
        """The residual, and the wrapped averager's state."""
        return {"residual": dict(self.residual), "inner": self.inner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        self.residual = take_tensors("error feedback", state["residual"], self.shapes)
        self.inner.load_state_dict(state["inner"])

    @property
    def rank(self) -> int | None:  # type: ignore[override]
        """The wrapped averager's."""
        return self.inner.rank

    def set_rank(self, rank: int) -> None:
        """Hand on to the wrapped averager."""
        self.inner.set_rank(rank)

    def planned_bytes(self, exchange: Exchange) -> int:
        """The wrapped averager's: feedback sends nothing of its own."""
        return self.inner.planned_bytes(exchange)

    def average(self, tensors: Tensors, exchange: Exchange, ledger: Ledger) -> Averaged:
        """See the base class; `relative_error` is that of input + residual."""
        wanted = {name: tensors[name] + self.residual[name] for name in self.shapes}
        averaged = self.inner.average(wanted, exchange, ledger)
        self.residual = {name: wanted[name] - averaged.sent[name] for name in self.shapes}
        return averaged
