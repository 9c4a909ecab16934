"""Replicas that are several data-parallel ranks: they share a LAN, and only the first of them talks across the WAN.

The members of a replica average their gradients in every inner step, so they stay bit-identical, and whatever one
of them would send across the WAN the others would send too. The first sends it; what it receives it hands on
over the LAN, so that everybody computes the same mean from the same bytes. Each tensor crosses the WAN once per
replica, however many ranks a replica has.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.collectives import Collective, Exchange, Wire
from trainer.metrics import Ledger
from trainer.process_group import ProcessGroup
from trainer.transfer import Phase, Transport, pieces


class ClusterLinks:
    """The WAN transport of one member of a replica; `wan` is None except for the first member.

    `relayed_bytes` is what this member handed to the LAN.
    """

    def __init__(
        self, wan: Transport | None, members: list[int], index: int, size: int, timeout: timedelta
    ) -> None:
        """Collective over `members`, the ranks of the replica's members of this stage."""
        self.wan, self.index, self.size = wan, index, size
        self._members, self._timeout = members, timeout
        # a group of its own: gradients are averaged over the LAN while an exchange is relayed in the background
        self.lan = ProcessGroup(dist.new_group(members, timeout=timeout, use_local_synchronization=True))
        self.relayed_bytes = 0
        self._streams: list[ClusterLinks] = []

    @property
    def handshake_bytes(self) -> int:
        """The first member's."""
        return self.wan.handshake_bytes if self.wan is not None else 0

    def framing_bytes(self, phases: list[Phase]) -> int:
        """The first member's."""
        return self.wan.framing_bytes(phases) if self.wan is not None else 0

    def run(self, phases: list[Phase]) -> None:
        """Phase by phase: across the WAN by the first member, from it to the others, then everybody's own work.

        That work may overwrite what was received, so it comes last; pieces of different phases do not
        overlap here, as they do where a replica is one rank a stage.
        """
        for phase in phases:
            if self.wan is not None:
                self.wan.run([Phase(phase.sends, phase.receives)])
            for row in phase.receives.values():
                self.share(row)
            if phase.arrived is not None:
                for start, stop in pieces(phase.received_bytes()):
                    phase.arrived(start, stop)

    def share(self, row: Tensor) -> None:
        """`row` of the first member becomes that of all; uint8 [c]."""
        others = range(1, self.lan.size)
        if self.wan is not None:
            self.relayed_bytes += row.numel() * len(others)
            self.lan.run([Phase(dict.fromkeys(others, row), {})])
        else:
            self.lan.run([Phase({}, {0: row})])

    def stream(self, name: str) -> ClusterLinks:
        """Independent of this one, on the WAN and on the LAN."""
        wan = self.wan.stream(name) if self.wan is not None else None
        stream = ClusterLinks(wan, self._members, self.index, self.size, self._timeout)
        self._streams.append(stream)
        return stream

    def all_relayed_bytes(self) -> int:
        """Those of streams included."""
        return self.relayed_bytes + sum(stream.all_relayed_bytes() for stream in self._streams)


class ClusterExchange(Exchange):
    """The exchange of one member of a replica: only the first sends across the WAN, and counts it."""

    def __init__(self, group: dist.ProcessGroup | None, bucket: str, links: ClusterLinks) -> None:
        super().__init__(group, bucket, links)
        self._cluster = links

    def _count(self, sent_bytes: int, framing_bytes: int = 0) -> None:
        if self._cluster.wan is not None:
            super()._count(sent_bytes, framing_bytes)

    def planned_gather_bytes(self, payload_bytes: int) -> int:
        """Nothing except for the first member."""
        return super().planned_gather_bytes(payload_bytes) if self._cluster.wan is not None else 0

    def planned_shuffle_bytes(self, sizes: list[int]) -> int:
        """Nothing except for the first member."""
        return super().planned_shuffle_bytes(sizes) if self._cluster.wan is not None else 0

    def planned_mean_bytes(self, numel: int, wire: Wire, collective: Collective) -> int:
        """Nothing except for the first member."""
        return super().planned_mean_bytes(numel, wire, collective) if self._cluster.wan is not None else 0

    def _naive_mean(self, flat: Tensor, wire: Wire, ledger: Ledger) -> Tensor:
        mean = torch.empty_like(flat)
        if self._cluster.wan is not None:
            mean.copy_(super()._naive_mean(flat, wire, ledger))
        with ledger.span(self.bucket):
            self._cluster.share(mean.view(torch.uint8))
        return mean

    def _another(self, links: Transport) -> Exchange:
        if not isinstance(links, ClusterLinks):
            raise TypeError("a stream of a cluster's links is one too")
        return ClusterExchange(self._group, self.bucket, links)


@dataclass(frozen=True)
class Cluster:
    """The members of this rank's replica that hold the same stage; `exchange` is theirs, over the LAN."""

    exchange: Exchange
    links: ClusterLinks | None  # None with one replica

    @property
    def sent_bytes(self) -> int:
        """Gradients and relayed exchanges that this rank handed to the LAN."""
        return self.exchange.sent_bytes + (self.links.all_relayed_bytes() if self.links else 0)

    def average_gradients(self, parameters: list[nn.Parameter], ledger: Ledger) -> None:
        """Gradient <- mean over the replica's members, the same bits on all."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        mean = self.exchange.mean(flat, "fp32", "tuned", ledger)
        for gradient, piece in zip(
            gradients, torch.split(mean, [gradient.numel() for gradient in gradients]), strict=True
        ):
            gradient.copy_(piece.view_as(gradient))
