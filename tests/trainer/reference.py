"""DiLoCoX and data-parallel SGD as a few plain lines in one process, to compare the real thing with."""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from trainer.config import TrainerConfig
from trainer.data import BYTE_VOCAB, Sampler, load_corpus
from trainer.inner import build_inner, learning_rate
from trainer.model import DecoderStage, Shape, build_stage, canonical_name

Weights = list[torch.Tensor]


def whole_model(config: TrainerConfig) -> DecoderStage:
    return build_stage(Shape.of(config.model, BYTE_VOCAB), 0, 1, config.data.seq_len, config.seed)


def batch_loss(model: DecoderStage, tokens: np.ndarray) -> torch.Tensor:
    batch = torch.from_numpy(tokens).long()
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def named(model: DecoderStage, weights: Weights) -> dict[str, np.ndarray]:
    names = [canonical_name(name) for name, _ in model.named_parameters()]
    return {name: weight.detach().numpy() for name, weight in zip(names, weights, strict=True)}


def big_batch(config: TrainerConfig) -> tuple[list[float], dict[str, np.ndarray]]:
    """One process trains on the global batch; losses and final weights."""
    sampler = Sampler(load_corpus(config.data, config.seed), config.data.seq_len, config.seed)
    model = whole_model(config)
    optimizer = build_inner(dict(model.named_parameters()), config.train)
    losses = []
    for step in range(1, config.train.steps + 1):
        optimizer.set_learning_rate(learning_rate(step, config.train))
        optimizer.zero_grad()
        tokens = sampler.batch(step, 0, config.parallel.replicas * config.train.batch_size)
        loss = batch_loss(model, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, named(model, list(model.parameters()))


def delayed(
    config: TrainerConfig, outer: Callable[[Weights, Weights], Weights]
) -> tuple[list[list[float]], dict[str, np.ndarray]]:
    """D replicas, exchange of round t applied at the end of round t+1; losses [replica][step], final theta.

    `outer(theta, Delta)` is the outer step. No compression.
    """
    method, size = config.method, config.train.batch_size
    sampler = Sampler(load_corpus(config.data, config.seed), config.data.seq_len, config.seed)
    models = [whole_model(config) for _ in range(config.parallel.replicas)]
    inners = [build_inner(dict(model.named_parameters()), config.train) for model in models]
    theta = [p.detach().clone() for p in models[0].parameters()]
    starts = [theta for _ in models]
    in_flight: list[Weights] | None = None
    losses: list[list[float]] = [[] for _ in models]
    for step in range(1, config.train.steps + 1):
        for i, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.set_learning_rate(learning_rate(step, config.train))
            inner.zero_grad()
            loss = batch_loss(model, sampler.batch(step, i * size, size))
            loss.backward()
            inner.step()
            losses[i].append(loss.item())
        if step % method.local_steps and step != config.train.steps:
            continue
        deltas = [
            [s - p.detach() for s, p in zip(start, model.parameters(), strict=True)]
            for start, model in zip(starts, models, strict=True)
        ]
        if in_flight is not None:
            theta = outer(theta, average(in_flight))
        in_flight = deltas
        keep = 1.0 if method.overlap.progress == "keep" else 0.0
        starts = [[t - keep * d for t, d in zip(theta, delta, strict=True)] for delta in deltas]
        for start, model in zip(starts, models, strict=True):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), start, strict=True):
                    parameter.copy_(value)
    theta = outer(theta, average(in_flight))
    return losses, named(models[0], theta)


def average(deltas: list[Weights]) -> Weights:
    return [sum(column) / len(column) for column in zip(*deltas, strict=True)]


def nesterov(lr: float, momentum: float) -> Callable[[Weights, Weights], Weights]:
    """v <- m v + g; theta <- theta - lr (g + m v)."""
    velocity: Weights = []

    def step(theta: Weights, delta: Weights) -> Weights:
        velocity[:] = [
            momentum * v + d for v, d in zip(velocity or [0 * d for d in delta], delta, strict=True)
        ]
        return [t - lr * (d + momentum * v) for t, d, v in zip(theta, delta, velocity, strict=True)]

    return step
