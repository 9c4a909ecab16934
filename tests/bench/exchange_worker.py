"""One rank of the exchange benchmark: tuned and naive means in turn, times written as JSON."""

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.collectives import Exchange
from trainer.metrics import Ledger

REPEATS = 5


def main() -> None:
    """Times each exchange a few times after one warm-up."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    exchange = Exchange(dist.group.WORLD, "exposed_comm_s")
    flat = torch.randn(int(sys.argv[1]) * 2**18)
    times: dict[str, list[float]] = {"tuned": [], "naive": []}
    for turn in range(REPEATS + 1):
        for name, measured in times.items():
            dist.barrier()
            began = time.perf_counter()
            exchange.mean(flat, "fp32", name, Ledger())
            if turn:
                measured.append(time.perf_counter() - began)
    named = {"ours (all-to-all + all-gather)": times["tuned"], "gloo all_reduce": times["naive"]}
    Path(sys.argv[2]).write_text(json.dumps(named), encoding="utf-8")
    dist.destroy_process_group()


main()
