"""An exchange between two members of a larger one, and who meets whom."""

from __future__ import annotations

import torch
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
        super().__init__(whole._group, whole.bucket, whole.links)
        self.size = 2
        self.index = int(partner < whole.index)
        self._whole = whole
        self._framing_bytes = 0  # the whole's connections were counted when they were opened
        self._partner = partner

    def _count(self, sent_bytes: int, framing_bytes: int = 0) -> None:
        super()._count(sent_bytes, framing_bytes)
        self._whole._count(sent_bytes, framing_bytes)

    def gather(self, payload: Tensor, ledger: Ledger) -> list[Tensor]:
        """Both payloads, the lower index first; equally long, uint8."""
        received = self.exchange_with(self._partner, payload, ledger)
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
