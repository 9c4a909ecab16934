"""One rank of the hop benchmark: stage 0 sends activations to stage 1 and back, alone and beside exchanges."""

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.collectives import Exchange
from trainer.config import ParallelConfig
from trainer.environment import read_environment
from trainer.metrics import Ledger
from trainer.ranks import World, connect

HOPS = 300
EXCHANGES = 8


def ping_pong(world: World, activation: torch.Tensor, pause_s: float) -> list[float]:
    """One-way times of HOPS round trips between the stages, half each; stage 1 measures nothing."""
    taken = []
    for _ in range(HOPS):
        began = time.perf_counter()
        if world.stage == 0:
            dist.send(activation, group=world.pipeline, group_dst=1)
            dist.recv(activation, group=world.pipeline, group_src=1)
            taken.append((time.perf_counter() - began) / 2)
            time.sleep(pause_s)  # a stage computes between its hops
        else:
            dist.recv(activation, group=world.pipeline, group_src=0)
            dist.send(activation, group=world.pipeline, group_dst=0)
    return taken


def main() -> None:
    """Hops alone, then hops while a thread exchanges."""
    kib, mib, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    parallel = ParallelConfig(replicas=2, stages=2)
    world = connect(parallel, read_environment(2, 2), timeout_s=60)
    exchange = Exchange(world.stage_peers, "exposed_comm_s", world.links)
    flat, activation = torch.randn(mib * 2**18), torch.randn(kib * 2**8)
    exchanged: list[float] = []

    def background() -> None:
        torch.set_num_threads(1)
        for _ in range(EXCHANGES):
            began = time.perf_counter()
            exchange.mean(flat, "fp32", "tuned", Ledger())
            exchanged.append(time.perf_counter() - began)

    exchange.mean(flat, "fp32", "tuned", Ledger())  # warm
    world.control.barrier()
    found = {"alone": {"hops": ping_pong(world, activation, 0.01), "exchanges": []}}
    world.control.barrier()
    thread = threading.Thread(target=background)
    thread.start()
    hops = ping_pong(world, activation, 0.01)
    thread.join()
    found["beside exchanges"] = {"hops": hops, "exchanges": exchanged}
    if world.rank == 0:
        file.write_text(json.dumps(found), encoding="utf-8")
    world.control.barrier()
    world.close()


main()
