"""The env:// contract between a launcher and the trainer, checked without importing torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.config import ParallelConfig


class WorldError(ValueError):
    """The launcher's environment and the configuration disagree; the message is one sentence."""


@dataclass(frozen=True)
class Environment:
    """What the launcher said: this process's rank, how many there are, and rank 0's control port."""

    rank: int
    world_size: int
    master_port: int


def read_environment(parallel: ParallelConfig) -> Environment:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, checked before anything is connected.

    Raises:
        WorldError: a variable is missing or no number, or the world is not as large as `parallel` says.
    """
    values: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = os.environ.get(name)
        if text is None or not text.isdecimal():
            raise WorldError(
                f"environment: {name}: found {'nothing' if text is None else repr(text)}, allowed a number; "
                f"start with torchrun or set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE"
            )
        values[name] = int(text)
    if not os.environ.get("MASTER_ADDR"):
        raise WorldError("environment: MASTER_ADDR: found nothing, allowed the address of rank 0")
    rank, size = values["RANK"], values["WORLD_SIZE"]
    if size != parallel.ranks:
        named, counted = "parallel.replicas x parallel.stages", f"{parallel.replicas} x {parallel.stages}"
        if parallel.data_parallel > 1:
            named, counted = f"{named} x parallel.data_parallel", f"{counted} x {parallel.data_parallel}"
        raise WorldError(
            f"environment: WORLD_SIZE: found {size}, allowed {named} = {counted} = {parallel.ranks}"
        )
    if rank >= size:
        raise WorldError(f"environment: RANK: found {rank}, allowed 0 to {size - 1}")
    return Environment(rank, size, values["MASTER_PORT"])
