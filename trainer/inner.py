"""The inner optimisation of one replica: optimiser, learning rate, clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from trainer.collectives import Exchange
from trainer.config import TrainConfig
from trainer.metrics import Ledger


def build_inner(parameters: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW with decay on matrices only, or SGD without momentum and decay."""
    parameters = list(parameters)
    if config.inner == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return torch.optim.AdamW(filled, lr=config.lr, betas=config.betas)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine to `min_lr_ratio` x lr at the last step; `step` counts from 1."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    decay_steps = max(config.steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Use `lr` for every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, pipeline: Exchange, ledger: Ledger
) -> float:
    """Scale gradients so that their norm over all stages of the replica is at most `max_norm`.

    Returns the norm before clipping. Squares are summed in fp64, in order of stage.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    own = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
    total = torch.cat(pipeline.gather_float64(own.reshape(1), ledger)).sum()
    norm = float(total.sqrt())
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)
    return norm
