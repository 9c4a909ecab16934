"""An exchange between two members of a larger one, and who meets whom."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.collectives import Collective, Exchange, Wire
from trainer.metrics import Ledger
from trainer.model import named_generator


def partner_in_round(index: int, size: int, number: int, seed: int) -> int:
    """Whom member `index` of `size` meets in round `number`: itself where it is the odd one out.

    A seeded permutation cut into pairs: the same on every rank, and symmetric.
    """
    order = torch.randperm(size, generator=named_generator(seed, "gossip", number)).tolist()
    place = order.index(index)
    other = place ^ 1
    return index if other >= size else int(order[other])


class PairExchange(Exchange):
    """The exchange of this member of `whole` with member `partner`, counted by `whole` too.

    Raises:
        ValueError: `partner` is this member.
    """

    def __init__(self, whole: Exchange, partner: int) -> None:
        if partner == whole.index:
            raise ValueError(f"a pair has two members, found {partner} twice")
        self.group, self.bucket, self.size = whole.group, whole.bucket, 2
        self.index = int(partner < whole.index)
        self._whole, self._partner = whole, partner
        self._sent = 0

    @property
    def sent_bytes(self) -> int:
        """Handed to the transport for this partner."""
        return self._sent

    def gather(self, payload: Tensor, ledger: Ledger) -> list[Tensor]:
        """Both payloads, the lower index first; equally long, uint8."""
        received = torch.empty_like(payload)
        if payload.numel():
            with ledger.span(self.bucket):
                self._sent += payload.numel()
                self._whole.count(payload.numel())
                peer = dist.get_global_rank(self.group, self._partner)
                ops = [
                    dist.P2POp(dist.isend, payload.contiguous(), peer, group=self.group),
                    dist.P2POp(dist.irecv, received, peer, group=self.group),
                ]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
        return [received, payload] if self.index else [payload, received]

    def planned_mean_bytes(self, numel: int, wire: Wire, collective: Collective) -> int:
        """Both send all that they have: between two that is what two passes of halves cost."""
        if wire != "fp32":
            raise ValueError(f"wire: found {wire!r}, allowed fp32 between two")
        return numel * 4

    def mean(self, flat: Tensor, wire: Wire, collective: Collective, ledger: Ledger) -> Tensor:
        """The mean of both members' fp32 [n], the same bits on both."""
        self.planned_mean_bytes(flat.numel(), wire, collective)
        first, second = (
            p.view(torch.float32) for p in self.gather(flat.contiguous().view(torch.uint8), ledger)
        )
        return (first + second) / 2
