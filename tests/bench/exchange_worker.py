"""One rank of the exchange benchmark: tuned and naive means in turn, times written as JSON."""

import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

import torch

from trainer.collectives import Exchange
from trainer.config import ParallelConfig
from trainer.environment import read_environment
from trainer.metrics import Ledger
from trainer.ranks import connect

TCP_INFO_BYTES = 232
TOTAL_RETRANS_OFFSET = 100  # tcpi_total_retrans, u32 (include/uapi/linux/tcp.h)


def main() -> None:
    """Times each exchange once cold and `repeats` times warm."""
    mib, repeats, file = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    parallel = ParallelConfig(replicas=int(os.environ["WORLD_SIZE"]))
    world = connect(parallel, read_environment(parallel), timeout_s=60)
    exchange = Exchange(world.stage_peers, "exposed_comm_s", world.links)
    flat = torch.randn(mib * 2**18)
    times: dict[str, list[float]] = {"tuned": [], "naive": []}
    for _ in range(repeats + 1):
        for name, measured in times.items():
            world.control.barrier()
            began = time.perf_counter()
            exchange.mean(flat, "fp32", name, Ledger())
            measured.append(time.perf_counter() - began)
    resent = sum(retransmitted(lane.socket) for lane in world.links.lanes)
    file.write_text(json.dumps({**times, "retransmitted": resent}), encoding="utf-8")
    world.control.barrier()
    world.close()


def retransmitted(connection: socket.socket) -> int:
    """Segments that this end sent again."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    return int(struct.unpack_from("=I", info, TOTAL_RETRANS_OFFSET)[0])


main()
