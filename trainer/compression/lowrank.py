"""Low-rank factors by one power iteration a round, exchanged in two dependent gathers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.collectives import Exchange
from trainer.compression.averagers import (
    Averaged,
    Averager,
    ColumnEnergy,
    ErrorMeter,
    Gathered,
    TakeSent,
    Tensors,
    ignore_sent,
    mean_in_rank_order,
    squared_norm,
)
from trainer.compression.codec import Codec, raw_bytes
from trainer.metrics import Ledger
from trainer.model import named_generator
from trainer.state import State, check_keys, take_tensors


def is_low_rank(shape: torch.Size, rank: int) -> bool:
    """Whether rank-`rank` factors of a matrix hold fewer values than the matrix: r (m + n) < m n."""
    return len(shape) == 2 and rank * (shape[0] + shape[1]) < shape[0] * shape[1]


class LowRankAverager(Averager):
    """Reconstruction of DiLoCoX's compression (arXiv:2506.21263, of which only the abstract was at hand).

    PowerSGD (arXiv:1905.13727) with encoded factors. For each matrix M_i [m, n] of replica i and a
    warm-started Q [n, r] that all replicas share:

    1. P_i = M_i Q, gathered encoded; P^ = an orthonormal basis of the mean of the decoded P_i.
    2. Q_i = M_i^T P^, gathered encoded. Replica i sent P^ dq(Q_i)^T; the mean is P^ (mean dq(Q_i))^T,
       and mean dq(Q_i) is the next round's Q.

    Tensors that are not matrices, or whose factors would be no smaller, travel encoded in the first
    payload. Choices where the sources are silent: Q's columns are normalised before use, and the factors
    are encoded column by column, so that weak columns keep their own block scales; a column of Q that
    died is replaced by a seeded one; resizing keeps the strongest columns and adds seeded ones.

    `average` also reports the energy the factors captured, from everybody's decoded Q_i and the
    squared norms of everybody's M_i, one fp64 that travels in the second payload and is counted.
    """

    rank: int

    def __init__(self, shapes: Mapping[str, torch.Size], codec: Codec, rank: int, seed: int) -> None:
        super().__init__(shapes)
        self.codec = codec
        self.rank = rank
        self._seed = seed
        self._draws = 0
        self._round = 0
        self._q: Tensors = {}
        self.set_rank(rank)

    def set_rank(self, rank: int) -> None:
        """Resize every Q; the same call on every replica leaves the same bits."""
        self.rank = rank
        self._draws += 1
        kept: Tensors = {}
        for name in self._matrices():
            rows = self.shapes[name][1]
            old = self._q.get(name, torch.empty(rows, 0))
            strongest = old.norm(dim=0).argsort(descending=True, stable=True)[:rank]
            fresh = self._seeded_columns(name, rows, rank - len(strongest))
            kept[name] = torch.cat((old[:, strongest], fresh), dim=1)
        self._q = kept

    def state_dict(self) -> State:
        """The warm Q, its rank, and how many seeded draws and exchanges there were."""
        return {"q": dict(self._q), "rank": self.rank, "draws": self._draws, "round": self._round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See the base class."""
        check_keys("low-rank averager", set(state), {"q", "rank", "draws", "round"})
        self.rank, self._draws, self._round = (int(state[key]) for key in ("rank", "draws", "round"))
        wanted = {name: torch.Size((self.shapes[name][1], self.rank)) for name in self._matrices()}
        self._q = take_tensors("low-rank averager", state["q"], wanted)

    def _seeded_columns(self, name: str, rows: int, columns: int) -> Tensor:
        generator = named_generator(self._seed, "low-rank Q", name, self._draws)
        return torch.randn(rows, columns, generator=generator)

    def _matrices(self) -> list[str]:
        return [name for name, shape in self.shapes.items() if is_low_rank(shape, self.rank)]

    def _plain(self) -> list[str]:
        return [name for name, shape in self.shapes.items() if not is_low_rank(shape, self.rank)]

    def _first_payload(self) -> dict[str, torch.Size]:
        """Shapes in the first payload: P^T [r, m] of the matrices, then the other tensors."""
        factors = {name: torch.Size((self.rank, self.shapes[name][0])) for name in self._matrices()}
        return factors | {name: self.shapes[name] for name in self._plain()}

    def _second_payload(self) -> dict[str, torch.Size]:
        """Shapes in the second payload: Q^T [r, n] of the matrices; eight bytes of energy follow."""
        return {name: torch.Size((self.rank, self.shapes[name][1])) for name in self._matrices()}

    def planned_bytes(self, exchange: Exchange) -> int:
        """Both payloads, to each of the others."""
        first = sum(map(self.codec.nbytes, self._first_payload().values()))
        planned = exchange.planned_gather_bytes(first)
        if second := self._second_payload():
            planned += exchange.planned_gather_bytes(sum(map(self.codec.nbytes, second.values())) + 8)
        return planned

    def average(
        self, tensors: Tensors, exchange: Exchange, ledger: Ledger, take_sent: TakeSent = ignore_sent
    ) -> Averaged:
        """See the class and the base class."""
        self._round += 1
        matrices = self._matrices()
        first = {name: (tensors[name] @ self._direction(name)).T for name in matrices}
        first |= {name: tensors[name] for name in self._plain()}
        gathered = Gathered(self.codec, first, self._round, exchange, ledger)
        meter, mean = ErrorMeter(), {}
        basis: Tensors = {}
        for name, everybody in gathered.decoded():
            average = mean_in_rank_order(everybody)
            if is_low_rank(self.shapes[name], self.rank):
                basis[name] = torch.linalg.qr(average.T).Q
                continue
            mean[name] = average
            meter.add(tensors[name], everybody[exchange.index])
            take_sent(name, everybody[exchange.index])
        if not matrices:
            return Averaged(mean, meter.relative)

        second = {name: (tensors[name].T @ basis[name]).T for name in matrices}
        total = sum(squared_norm(tensors[name]) for name in matrices)
        extra = raw_bytes(torch.tensor([total], dtype=torch.float64))
        gathered = Gathered(self.codec, second, self._round, exchange, ledger, extra=extra)
        columns = torch.zeros(self.rank, dtype=torch.float64)
        for name, everybody in gathered.decoded():
            self._q[name] = mean_in_rank_order(everybody).T.contiguous()
            mean[name] = basis[name] @ self._q[name].T
            sent = basis[name] @ everybody[exchange.index]
            meter.add(tensors[name], sent)
            take_sent(name, sent)
            energy = torch.stack([f.double().square().sum(dim=1) for f in everybody]).mean(dim=0)
            columns += energy.sort(descending=True).values
        totals = [float(extra.clone().view(torch.float64)) for extra in gathered.extras()]
        return Averaged(mean, meter.relative, ColumnEnergy(columns, sum(totals) / len(totals)))

    def _direction(self, name: str) -> Tensor:
        """Q with unit columns; dead ones are replaced."""
        q = self._q[name]
        norms = q.norm(dim=0)
        dead = norms == 0
        if dead.any():
            self._draws += 1
            q = torch.where(dead, self._seeded_columns(name, *q.shape), q)
            norms = q.norm(dim=0)
        unit: Tensor = q / norms
        return unit
