"""A sum over all ranks, for torchrun: each rank says what it got, how long it took, and at which bus bandwidth.

Nothing here knows of the testbed; docs/running-programs.md shows the command.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

MIB = 16
LIMIT = timedelta(seconds=60)


def main() -> None:
    """Sums a tensor of rank + 1 over all ranks and checks the result."""
    dist.init_process_group("gloo", timeout=LIMIT)
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((MIB * 2**18,), float(rank + 1))
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(tensor)
    seconds = time.perf_counter() - began
    if not torch.all(tensor == world * (world + 1) / 2):
        raise SystemExit(f"rank {rank}: the sum is wrong")
    bus_mbps = 2 * (world - 1) / world * MIB * 2**23 / seconds / 1e6
    where = os.environ.get("TESTBED_NODE", "here")
    print(f"rank {rank} of {world} on {where}: sum {tensor[0]:g}, {seconds:.2f} s, {bus_mbps:.0f} Mbit/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
