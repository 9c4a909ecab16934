"""torchft's DiLoCo, one replica a node: a lighthouse on the first node, managers that form a quorum, outer steps.

Run by ``dilocox exec``; docs/running-programs.md shows the command. It prints the outer parameters' checksum after
the last outer step, which must be the same on every node.
"""

import os
import socket
import sys
from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

LIMIT = timedelta(seconds=60)
LIGHTHOUSE_PORT = 29510
LOCAL_STEPS = 4
OUTER_STEPS = 3
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
WIDTH = 256


def model() -> nn.Module:
    """The same parameters on every node."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def inner_optimiser(net: nn.Module) -> torch.optim.Optimizer:
    """What a replica trains with between outer steps."""
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def loss_of(net: nn.Module, replica: int, step: int) -> Tensor:
    """A regression on data of the replica's own."""
    generator = torch.Generator().manual_seed(1000 * replica + step)
    inputs = torch.randn(32, WIDTH, generator=generator)
    return nn.functional.mse_loss(net(inputs), inputs.roll(1, dims=1))


def checksum(net: nn.Module) -> float:
    """A sum that depends on every parameter."""
    flat = torch.cat([p.detach().flatten() for p in net.parameters()]).double()
    return float(flat @ torch.linspace(1, 2, flat.numel(), dtype=torch.float64))


def main() -> int:
    """Trains one replica; 0 when every outer step was committed."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    address = socket.gethostbyname(os.environ["TESTBED_NODE"])
    lighthouse = (
        LighthouseServer(bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=world) if rank == 0 else None
    )
    # a torchft replica is a job of its own, with a store of its own: here of one process
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    net = model()
    inner = inner_optimiser(net)
    outer = torch.optim.SGD(net.parameters(), **OUTER)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=world,
        use_async_quorum=False,
        init_sync=False,  # all start from the same seed
        load_state_dict=net.load_state_dict,
        state_dict=net.state_dict,
        replica_id=f"replica-{rank}",
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        hostname=address,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
    )
    with DiLoCo(manager, [net], inner, outer, sync_every=LOCAL_STEPS, pin_memory=False):
        step = 0
        while manager.current_step() < OUTER_STEPS and step < 2 * OUTER_STEPS * LOCAL_STEPS:
            inner.zero_grad()
            loss = loss_of(net, rank, step)
            loss.backward()
            inner.step()
            step += 1
    done = manager.current_step()
    print(
        f"replica {rank} of {manager.num_participants()}: {done} outer steps, loss {loss.item():.4f},"
        f" outer parameters {checksum(net):.6f}",
        flush=True,
    )
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()
    return 0 if done == OUTER_STEPS else 1


if __name__ == "__main__":
    sys.exit(main())
