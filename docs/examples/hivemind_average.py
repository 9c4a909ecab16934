"""hivemind's decentralised averaging between nodes: peers find each other through its DHT and average tensors.

Run by ``dilocox exec``; docs/running-programs.md shows the command. The first rank's address in the DHT travels
through torch's key-value store, which the ``env://`` variables name.
"""

import os
import socket
import sys
from datetime import timedelta

import hivemind
import torch
from torch.distributed import TCPStore

LIMIT_S = 60
NUMBERS = 1_000_000


def meet(store: TCPStore, place: str, world: int) -> None:
    """Waits until every rank has come to a place of this name."""
    if store.add(place, 1) == world:
        store.set(f"{place}: all here", "yes")
    store.wait([f"{place}: all here"])


def main() -> int:
    """Averages a tensor of the rank over all ranks and checks the result; 0 when it is right."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=rank == 0,
        timeout=timedelta(seconds=LIMIT_S),
    )
    address = socket.gethostbyname(os.environ["TESTBED_NODE"])
    dht = hivemind.DHT(
        initial_peers=None if rank == 0 else [store.get("first peer").decode()],
        host_maddrs=[f"/ip4/{address}/tcp/0"],
        auto_nat=False,
        nat_port_map=False,
        use_relay=False,
        start=True,
    )
    if rank == 0:
        store.set("first peer", str(dht.get_visible_maddrs()[0]))

    tensor = torch.full((NUMBERS,), float(rank))
    averager = hivemind.DecentralizedAverager(
        [tensor],
        dht,
        prefix="example",
        target_group_size=world,
        min_group_size=world,
        min_matchmaking_time=5.0,
        start=True,
    )
    meet(store, "ready", world)
    group = averager.step(timeout=LIMIT_S)
    with averager.get_tensors() as (averaged,):
        right = bool(torch.allclose(averaged, torch.full((NUMBERS,), (world - 1) / 2)))
        print(
            f"rank {rank}: mean {averaged[0]:g} over {len(group)} peers, {'right' if right else 'wrong'}",
            flush=True,
        )
    meet(store, "done", world)  # a peer that leaves early is missed by the others
    averager.shutdown()
    dht.shutdown()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
