"""The transport of torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainer.transfer import Phase, pieces


class ProcessGroup:
    """Moves whole phases by batched sends and receives of a process group, whatever its backend.

    Used on the LAN, where latency is small, and for tensors on a GPU. It knows nothing of streams.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.index = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.handshake_bytes = 0

    def run(self, phases: list[Phase]) -> None:
        """One phase after the other.

        Raises:
            RuntimeError: a peer went away or the group's timeout passed.
        """
        for phase in phases:
            operations = [self._operation(dist.irecv, row, peer) for peer, row in phase.receives.items()]
            operations += [self._operation(dist.isend, row, peer) for peer, row in phase.sends.items()]
            operations = [operation for operation in operations if operation.tensor.numel()]
            if operations:
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
            if phase.arrived is not None:
                for start, stop in pieces(phase.received_bytes()):
                    phase.arrived(start, stop)

    def _operation(self, kind: Callable[..., Any], row: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, row, group=self.group, group_peer=peer)

    def framing_bytes(self, phases: list[Phase]) -> int:
        """Unknown here: gloo adds about 300 bytes to a message."""
        return 0

    def stream(self, name: str) -> ProcessGroup:
        """Refused: a process group matches messages by order alone."""
        raise RuntimeError(f"stream {name!r}: only the TCP transport has independent streams")
