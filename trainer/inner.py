"""The inner optimisation of one replica: optimiser, learning rate, clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from trainer.collectives import Exchange
from trainer.config import TrainConfig
from trainer.metrics import Ledger
from trainer.state import State, check_keys, load_optimizer_state, optimizer_state


class InnerOptimizer:
    """One or two torch optimisers that step together, each with its own share of the parameters."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        """One inner step with the gradients that the parameters hold."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget the gradients and free their memory."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self, parameters: Mapping[str, nn.Parameter]) -> State:
        """What the optimisers keep for each of `parameters`, by name."""
        state: State = {}
        for optimizer in self.optimizers:
            state |= optimizer_state(optimizer, parameters)
        return state

    def load_state_dict(self, parameters: Mapping[str, nn.Parameter], state: Mapping[str, Any]) -> None:
        """The opposite of `state_dict`; raises StateError if the state is of other parameters."""
        check_keys("inner optimiser", set(state) - set(parameters), set())
        for optimizer in self.optimizers:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            named = {name: p for name, p in parameters.items() if id(p) in own}
            load_optimizer_state(optimizer, named, {name: state[name] for name in named if name in state})

    def set_learning_rate(self, lr: float) -> None:
        """Use `lr` for every parameter."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr


def build_inner(parameters: Mapping[str, nn.Parameter], config: TrainConfig) -> InnerOptimizer:
    """AdamW with decay on matrices only, Muon, or SGD without momentum and decay; parameters by name.

    Muon (as in MuLoCo, arXiv:2505.23725) moves the matrices inside the layers, AdamW all else. Its
    update is scaled to AdamW's root mean square (arXiv:2502.16982), so that one learning rate serves both.
    """
    if config.inner == "sgd":
        return InnerOptimizer(torch.optim.SGD(parameters.values(), lr=config.lr))
    hidden = [p for name, p in parameters.items() if p.dim() == 2 and name.startswith("layers.")]
    muon = hidden if config.inner == "muon" else []
    rest = [p for p in parameters.values() if all(p is not other for other in muon)]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    adamw = torch.optim.AdamW(filled, lr=config.lr, betas=config.betas)
    if not muon:
        return InnerOptimizer(adamw)
    return InnerOptimizer(
        torch.optim.Muon(
            muon, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        adamw,
    )


def learning_rate(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 1; see `TrainConfig`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    after_warmup = max(config.steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / after_warmup, 1.0)
    if config.schedule == "constant":
        height = 1.0
    elif config.schedule == "wsd":
        stable = 1 - min(config.decay_share * config.steps / after_warmup, 1.0)
        height = 1.0 if progress <= stable else (1 - progress) / (1 - stable)
    else:
        height = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * height)


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
