"""What worker processes do as ranks; everything returned is JSON."""

import hashlib
import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.collectives import Exchange
from trainer.compression import ErrorFeedback, build_averager
from trainer.compression.rank_control import RankControl
from trainer.config import ParallelConfig, TrainerConfig
from trainer.data import load_corpus
from trainer.environment import read_environment
from trainer.method_config import DiLoCoXConfig
from trainer.metrics import Ledger
from trainer.ranks import World, connect
from trainer.resume import find
from trainer.train import Trainer

torch.set_num_threads(1)


@contextmanager
def connected(parallel: ParallelConfig) -> Iterator[World]:
    environment = read_environment(parallel)
    world = connect(parallel, environment, timeout_s=30)
    try:
        yield world
        world.control.barrier()
    finally:
        world.close()


def train(config: dict[str, Any], out: str, resume: bool = False) -> str:
    """Train, or go on training."""
    checked = TrainerConfig.model_validate(config)
    folder = Path(out)
    corpus = load_corpus(checked.data, checked.seed)
    with connected(checked.parallel) as world:
        resumed = find(checked, world, folder, corpus.sha256) if resume else None
        return Trainer(checked, world, corpus, folder, resumed=resumed).run()["status"]


def train_with_modules_of(folder: str, config: dict[str, Any], out: str) -> str:
    """`train`, with a folder of modules that the configuration names."""
    sys.path.insert(0, folder)
    try:
        return train(config, out)
    finally:
        sys.path.remove(folder)
        sys.modules.pop("my_methods", None)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def means(replicas: int, numels: list[int]) -> list[dict[str, Any]]:
    """Average random tensors every way there is."""
    results = []
    with connected(ParallelConfig(replicas=replicas)) as world:
        over = {
            "tcp": Exchange(world.stage_peers, "exposed_comm_s", world.links),
            "gloo": Exchange(world.stage_peers, "exposed_comm_s"),
        }
        ways = itertools.product(numels, ("tuned", "naive"), ("fp32", "bf16", "fp16"), over)
        for numel, collective, wire, transport in ways:
            everybody = [random(numel, replica) for replica in range(replicas)]
            expected = torch.stack(everybody).double().mean(dim=0)
            exchange = over[transport]
            before = exchange.sent_bytes
            mean = exchange.mean(everybody[world.replica], wire, collective, Ledger())
            results.append(
                {
                    "case": f"{collective} {wire} {numel}",
                    "transport": transport,
                    "wire": wire,
                    "digest": digest(mean),
                    "error": float((mean.double() - expected).abs().max()) if numel else 0.0,
                    "sent": exchange.sent_bytes - before,
                    "planned": exchange.planned_mean_bytes(numel, wire, collective),
                }
            )
    return results


def gathers(replicas: int, numels: list[int]) -> list[bool]:
    """Whether gathered payloads are everybody's, in rank order, and counted."""
    right = []
    with connected(ParallelConfig(replicas=replicas)) as world:
        exchange, ledger = Exchange(world.stage_peers, "exposed_comm_s", world.links), Ledger()
        for numel in numels:
            everybody = [(random(numel, r) * 50).to(torch.int8).view(torch.uint8) for r in range(replicas)]
            before = exchange.sent_bytes
            gathered = exchange.gather(everybody[world.replica], ledger)
            same = all(torch.equal(a, b) for a, b in zip(gathered, everybody, strict=True))
            right.append(same and exchange.sent_bytes - before == (replicas - 1) * numel)
    return right


def random(numel: int, *key: int) -> torch.Tensor:
    seed = int.from_bytes(hashlib.sha256(repr((numel, key)).encode()).digest()[:7], "big")
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


SHAPES = {
    "wide": torch.Size((24, 40)),
    "tall": torch.Size((40, 16)),
    "narrow": torch.Size((50, 3)),
    "gain": torch.Size((33,)),
}


def averaging(replicas: int, compressors: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Laws of an averager over several rounds of random tensors."""
    results = []
    with connected(ParallelConfig(replicas=replicas)) as world:
        exchange, ledger = Exchange(world.stage_peers, "exposed_comm_s", world.links), Ledger()
        for compressor in compressors:
            config = DiLoCoXConfig(name="dilocox", compressor=compressor).compressor
            averager = build_averager(config, SHAPES, seed=3)
            for number in range(rounds):
                tensors = {n: random(s.numel(), number, world.replica).view(s) for n, s in SHAPES.items()}
                feedback = isinstance(averager, ErrorFeedback)
                decay = averager.decay if feedback else 0.0
                owed = {n: decay * r for n, r in averager.residual.items()} if feedback else {}
                contributed = {}
                planned, before = averager.planned_bytes(exchange), exchange.sent_bytes
                averaged = averager.average(
                    tensors,
                    exchange,
                    ledger,
                    lambda n, sent, kept=contributed: kept.update({n: sent.clone()}),
                )
                sent = torch.cat([contributed[n].reshape(-1) for n in SHAPES])
                mean = torch.cat([averaged.mean[n].reshape(-1) for n in SHAPES])
                everybody = exchange.gather(sent.view(torch.uint8), ledger)
                expected = torch.stack([row.view(torch.float32) for row in everybody]).mean(dim=0)
                wanted = torch.cat([(tensors[n] + owed.get(n, 0)).reshape(-1) for n in SHAPES])
                residual = (
                    torch.cat([averager.residual[n].reshape(-1) for n in SHAPES])
                    if feedback
                    else wanted - sent
                )
                energy = averaged.energy
                results.append(
                    {
                        "case": f"{compressor} round {number}",
                        "sent_bytes": exchange.sent_bytes
                        - before
                        - exchange.planned_gather_bytes(sent.nbytes),
                        "planned_bytes": planned,
                        "digest": digest(mean),
                        "mean_error": float((mean - expected).abs().max()),
                        "feedback": feedback,
                        "feedback_error": float((sent + residual - wanted).abs().max()),
                        "relative_error": averaged.relative_error,
                        "true_relative_error": float((wanted - sent).norm() / wanted.norm()),
                        "captured": None if energy is None else float(energy.columns.sum()) / energy.total,
                    }
                )
    return results


def spectrum(replicas: int, rank: int, decays: list[float], changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Rank and H while the spectrum of the pseudo-gradient changes: singular values k^-decay."""
    track = []
    with connected(ParallelConfig(replicas=replicas)) as world:
        exchange, ledger = Exchange(world.stage_peers, "exposed_comm_s", world.links), Ledger()
        settings = {"name": "lowrank-int4", "rank": rank, "adaptive": True, **changes}
        config = DiLoCoXConfig(name="dilocox", compressor=settings, local_steps=rank).compressor
        averager = build_averager(config, {"w": torch.Size((96, 128))}, seed=0)
        control = RankControl(config, local_steps=rank)
        for number, decay in enumerate(decays):
            left = torch.linalg.qr(random(96 * 96, 1).view(96, 96)).Q
            right = torch.linalg.qr(random(128 * 96, 2).view(128, 96)).Q
            values = torch.arange(1, 97).float() ** -decay
            noise = 0.01 * random(96 * 128, 3, number, world.replica).view(96, 128) / 100
            averaged = averager.average({"w": left * values @ right.T + noise}, exchange, ledger)
            effective = control.observe(averaged.energy.columns, averaged.energy.total)
            averager.set_rank(control.rank)
            track.append({"rank": control.rank, "local_steps": control.local_steps, "effective": effective})
    return track
