"""Who this process is, and the groups it talks in.

rank = (replica * data_parallel + member) * stages + stage: a replica's stages are neighbours, because a
replica is a site. Stage peers (the same stage of every replica, of its first member) talk across the WAN; the
stages and members of a replica talk over its LAN. Barriers go through the rendezvous store on MASTER_PORT, so that waiting moves no data-plane byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from trainer.cluster import Cluster, ClusterExchange, ClusterLinks
from trainer.collectives import Exchange
from trainer.config import ParallelConfig
from trainer.environment import Environment
from trainer.links import PeerLinks
from trainer.membership import Membership


@dataclass(frozen=True)
class World:
    """This process's place in the D x M grid, its two groups, and the control store."""

    rank: int
    replicas: int
    stages: int
    data_parallel: int
    stage_peers: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    control: Control | Membership
    master_port: int
    links: PeerLinks | None
    """Between the stage peers, across the WAN; None where there is one replica, and except on first members."""
    cluster: Cluster | None
    """The data-parallel ranks of this stage of this replica; None where there is one."""

    @property
    def replica(self) -> int:
        """Which replica, 0 .. D-1."""
        return self.rank // (self.stages * self.data_parallel)

    @property
    def member(self) -> int:
        """Which data-parallel rank of the replica, 0 .. data_parallel-1."""
        return self.rank // self.stages % self.data_parallel

    @property
    def speaks(self) -> bool:
        """Whether this rank evaluates and writes what all of its stage have in common."""
        return self.replica == 0 and self.member == 0

    def wan(self, bucket: str) -> Exchange:
        """The exchange with the other replicas' ranks of this stage."""
        if self.cluster is not None and self.cluster.links is not None:
            return ClusterExchange(self.stage_peers, bucket, self.cluster.links)
        return Exchange(self.stage_peers, bucket, self.links)

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
    members = parallel.data_parallel
    stage, member, replica = rank % stages, rank // stages % members, rank // (stages * members)

    def rank_of(replica: int, member: int, stage: int) -> int:
        return (replica * members + member) * stages + stage

    def group(ranks: list[int]) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        return made

    peers = [rank_of(other, member, stage) for other in range(replicas)]
    links = None
    if replicas > 1 and member == 0:
        links = PeerLinks(PrefixStore(f"trainer-links/{stage}", store), replica, peers, timeout_s)
    cluster = None
    if members > 1:
        mates = [rank_of(replica, other, stage) for other in range(members)]
        relay = ClusterLinks(links, mates, replica, replicas, timeout) if replicas > 1 else None
        cluster = Cluster(Exchange(group(mates), "bubble_s"), relay)
    return World(
        rank,
        replicas,
        stages,
        members,
        stage_peers=group(peers),
        pipeline=group([rank_of(replica, member, other) for other in range(stages)]),
        control=Control(store, rank, size, timeout_s),
        master_port=environment.master_port,
        links=links,
        cluster=cluster,
    )
