"""A world in which every replica is a world of its own, so that the end of one breaks no other."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from trainer.config import TrainerConfig
from trainer.environment import Environment
from trainer.membership import Membership
from trainer.ranks import World
from trainer.survive import Survivors


def connect_replica(config: TrainerConfig, environment: Environment) -> tuple[World, Survivors]:
    """Take a seat at the coordinator, then join the replica's own process group; collective over its stages.

    Connections to other replicas are made by `Survivors.connect`.

    Raises:
        MembershipError: no coordinator, or nobody let this replica in.
        RuntimeError: torch could not connect the replica's stages.
    """
    parallel, timeout_s = config.parallel, config.train.timeout_s
    rank, stages = environment.rank, parallel.stages
    host, timeout = os.environ["MASTER_ADDR"], timedelta(seconds=timeout_s)
    membership = Membership(host, environment.master_port + 1, rank, timeout_s)
    store = TCPStore(host, environment.master_port, is_master=False, timeout=timeout)
    replica, stage = divmod(rank, stages)
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"replica/{replica}/{membership.welcome.epoch}", store),
        rank=stage,
        world_size=stages,
        timeout=timeout,
    )
    own = dist.distributed_c10d._get_default_group()
    world = World(
        rank,
        parallel.replicas,
        stages,
        1,  # a replica that can be lost has one rank a stage
        stage_peers=own,
        pipeline=own,
        control=membership,
        master_port=environment.master_port,
        links=None,
        cluster=None,
    )
    weights = [config.weight(replica) for replica in range(parallel.replicas)]
    return world, Survivors(membership, store, stages, weights, timeout_s)
