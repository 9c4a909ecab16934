"""Who this process is, and the groups it talks in.

rank = replica * stages + stage: a replica's stages are neighbours, because a replica is a site.
Stage peers (the same stage of every replica) talk across the WAN; the stages of a replica talk over
its LAN. Barriers go through the rendezvous store on MASTER_PORT, so that waiting moves no data-plane byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from trainer.config import ParallelConfig
from trainer.environment import Environment
from trainer.links import PeerLinks


@dataclass(frozen=True)
class World:
    """This process's place in the D x M grid, its two groups, and the control store."""

    rank: int
    replicas: int
    stages: int
    stage_peers: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    control: Control
    master_port: int
    links: PeerLinks | None
    """Between the stage peers, across the WAN; None where there is one replica."""

    @property
    def replica(self) -> int:
        """Which replica, 0 .. D-1."""
        return self.rank // self.stages

    @property
    def stage(self) -> int:
        """Which pipeline stage, 0 .. M-1."""
        return self.rank % self.stages

    def close(self) -> None:
        """Close all connections of the data plane."""
        if self.links is not None:
            self.links.close()
        dist.destroy_process_group()


class Control:
    """Barriers over the rendezvous store: a few small messages to MASTER_PORT, none between data ports."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store = PrefixStore("trainer-control", store)
        self._rank, self._size = rank, size
        self._timeout = timedelta(seconds=timeout_s)
        self._passed = 0

    def barrier(self) -> None:
        """Return once every rank has called this equally often.

        Raises:
            RuntimeError: not everybody came within the timeout.
        """
        self._passed += 1
        if self._store.add(f"arrived/{self._passed}", 1) == self._size:
            self._store.set(f"open/{self._passed}", "")
        self._store.wait([f"open/{self._passed}"], self._timeout)

    def gather(self, text: str) -> list[str]:
        """Everybody's `text`, in rank order; for a few small agreements, through the store.

        Raises:
            RuntimeError: not everybody came within the timeout.
        """
        key = f"said/{self._passed}"
        self._store.set(f"{key}/{self._rank}", text)
        self.barrier()
        return [self._store.get(f"{key}/{rank}").decode() for rank in range(self._size)]


def connect(parallel: ParallelConfig, environment: Environment, timeout_s: float) -> World:
    """Join the world and make this process's groups; collective over all ranks.

    Raises:
        RuntimeError: torch could not connect everybody within `timeout_s`.
    """
    timeout = timedelta(seconds=timeout_s)
    replicas, stages = parallel.replicas, parallel.stages
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    dist.init_process_group(
        "gloo", store=PrefixStore("trainer-data", store), rank=rank, world_size=size, timeout=timeout
    )
    # every rank makes every group, in the same order
    peers = [
        dist.new_group([replica * stages + stage for replica in range(replicas)], timeout=timeout)
        for stage in range(stages)
    ]
    pipelines = [
        dist.new_group([replica * stages + stage for stage in range(stages)], timeout=timeout)
        for replica in range(replicas)
    ]
    links = None
    if replicas > 1:
        stage = rank % stages
        links = PeerLinks(
            PrefixStore(f"trainer-links/{stage}", store),
            rank // stages,
            [replica * stages + stage for replica in range(replicas)],
            timeout_s,
        )
    return World(
        rank,
        replicas,
        stages,
        stage_peers=peers[rank % stages],
        pipeline=pipelines[rank // stages],
        control=Control(store, rank, size, timeout_s),
        master_port=environment.master_port,
        links=links,
    )
