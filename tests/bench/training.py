"""Tokens per second of one rank (D = 1, M = 1) beside a plain loop over the same model, in turns in one process."""

import contextlib
import io
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from trainer.config import TrainerConfig
from trainer.data import BYTE_VOCAB, Corpus, Sampler, load_corpus
from trainer.environment import read_environment
from trainer.model import Shape, build_stage
from trainer.ranks import World, connect
from trainer.train import Trainer

TARGET = 0.97
TURNS = 7
STEPS = {"decoder-1m": 12, "decoder-4m": 6}


def config_of(preset: str, dtype: str) -> TrainerConfig:
    """What both train: one microbatch, so that both see the same matrices."""
    return TrainerConfig.model_validate(
        {
            "model": {"preset": preset},
            "parallel": {"microbatches": 1},
            "train": {"steps": STEPS[preset], "batch_size": 8, "warmup_steps": 0, "dtype": dtype},
            "eval": {"every": 1000, "tokens": 128},
        }
    )


def plain_loop(config: TrainerConfig, corpus: Corpus) -> float:
    """The same training as one writes it by hand; tokens per second."""
    train, seq_len = config.train, config.data.seq_len
    bf16 = train.dtype == "bf16"
    model = build_stage(Shape.of(config.model, BYTE_VOCAB), 0, 1, seq_len, config.seed, autocast_bf16=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.lr, betas=train.betas)
    sampler = Sampler(corpus, seq_len, config.seed)
    began = time.perf_counter()
    for step in range(1, train.steps + 1):
        tokens = torch.from_numpy(sampler.batch(step, 0, train.batch_size)).long()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
    return config.tokens_per_step * train.steps / (time.perf_counter() - began)


def ours(config: TrainerConfig, corpus: Corpus, world: World) -> float:
    """Tokens per second of the trainer, everything included except evaluation."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        summary = Trainer(config, world, corpus, Path(folder)).run()
    return float(summary["tokens"] / summary["wall_s"])


def run(console: Console) -> None:
    """Prints the ratio of medians; the target is 97 %."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"LOCAL_RANK": "0", "GLOO_SOCKET_IFNAME": "lo"}
    table = Table(title=f"one rank, tokens/s, medians of {TURNS} turns", title_justify="left")
    for column in ("model", "dtype", "plain loop", "trainer", "median ratio", f"target {TARGET:.0%}"):
        table.add_column(column, justify="left" if column == "model" else "right")
    alone = config_of("decoder-1m", "fp32").parallel
    world = connect(alone, read_environment(alone), timeout_s=30)
    for preset in STEPS:
        for dtype in ("fp32", "bf16"):
            config = config_of(preset, dtype)
            corpus = load_corpus(config.data, config.seed)
            plain_loop(config, corpus)
            pairs = [(plain_loop(config, corpus), ours(config, corpus, world)) for _ in range(TURNS)]
            ratio = statistics.median(b / a for a, b in pairs)
            plain, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
            verdict = "PASS" if ratio >= TARGET else "FAIL"
            table.add_row(preset, dtype, f"{plain:,.0f}", f"{mine:,.0f}", f"{ratio:.3f}", verdict)
    world.close()
    console.print(table)
