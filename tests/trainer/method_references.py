"""Methods as a few plain lines in one process: what local training does between rounds, and each method's rule."""

from collections.abc import Callable

import numpy as np
import torch
from reference import Weights, average, batch_loss, named, nesterov, whole_model

from trainer.config import TrainerConfig
from trainer.data import Sampler, load_corpus
from trainer.inner import build_inner, learning_rate
from trainer.methods.pairs import partner_in_round
from trainer.methods.streaming_diloco import fragment_of

Rule = Callable[[list[Weights], bool], list[Weights]]


def local_rounds(
    config: TrainerConfig, rule: Callable[[Weights], Rule]
) -> tuple[list[list[float]], list[dict[str, np.ndarray]]]:
    """D replicas train; at the end of each round `rule(weights by replica, last)` gives what they go on from.

    Returns losses [replica][step] and each replica's final weights by name.
    """
    size, steps = config.train.batch_size, config.train.steps
    sampler = Sampler(load_corpus(config.data, config.seed), config.data.seq_len, config.seed)
    models = [whole_model(config) for _ in range(config.parallel.replicas)]
    inners = [build_inner(dict(model.named_parameters()), config.train) for model in models]
    close = rule([p.detach().clone() for p in models[0].parameters()])
    losses: list[list[float]] = [[] for _ in models]
    for step in range(1, steps + 1):
        for i, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.set_learning_rate(learning_rate(step, config.train))
            inner.zero_grad()
            loss = batch_loss(model, sampler.batch(step, i * size, size))
            loss.backward()
            inner.step()
            losses[i].append(loss.item())
        if step % config.method.local_steps and step != steps:
            continue
        ends = [[p.detach().clone() for p in model.parameters()] for model in models]
        for model, start in zip(models, close(ends, step == steps), strict=True):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), start, strict=True):
                    parameter.copy_(value)
    return losses, [named(model, list(model.parameters())) for model in models]


def minus(left: Weights, right: Weights) -> Weights:
    return [a - b for a, b in zip(left, right, strict=True)]


def eager(
    replicas: int, outer: Callable[[], Callable[[Weights, Weights], Weights]]
) -> Callable[[Weights], Rule]:
    """g_i = Delta_{t-1} + (delta_i(t) - delta_i(t-1)) / D, an outer optimiser for each replica."""

    def begin(initial: Weights) -> Rule:
        thetas = [initial for _ in range(replicas)]
        outers = [outer() for _ in range(replicas)]
        previous = [[0 * p for p in initial] for _ in range(replicas)]

        def move(deltas: list[Weights]) -> None:
            mean = average(previous)
            for i in range(replicas):
                own = minus(deltas[i], previous[i])
                g = [m + o / replicas for m, o in zip(mean, own, strict=True)]
                thetas[i] = outers[i](thetas[i], g)

        def close(ends: list[Weights], last: bool) -> list[Weights]:
            deltas = [minus(theta, end) for theta, end in zip(thetas, ends, strict=True)]
            move(deltas)
            previous[:] = deltas
            if last:  # the average of the last round arrives, with no further round beside it
                move([[0 * p for p in initial] for _ in range(replicas)])
            return thetas

        return close

    return begin


def gossip(config: TrainerConfig) -> Callable[[Weights], Rule]:
    """Modified Nesterov momentum between random pairs."""
    method, replicas = config.method, config.parallel.replicas

    def begin(initial: Weights) -> Rule:
        slow = [initial for _ in range(replicas)]
        velocity = [[0 * p for p in initial] for _ in range(replicas)]
        number = 0

        def close(ends: list[Weights], last: bool) -> list[Weights]:
            nonlocal number
            number += 1
            deltas = [minus(phi, end) for phi, end in zip(slow, ends, strict=True)]
            before = list(slow)
            for i in range(replicas):
                j = partner_in_round(i, replicas, number, config.seed)
                delta, phi = average([deltas[i], deltas[j]]), average([before[i], before[j]])
                velocity[i] = [
                    method.momentum * v - method.lr * d - method.gossip * (own - mean)
                    for v, d, own, mean in zip(velocity[i], delta, before[i], phi, strict=True)
                ]
                slow[i] = [own + v for own, v in zip(before[i], velocity[i], strict=True)]
            return slow

        return close

    return begin


def accumulated(config: TrainerConfig) -> tuple[list[float], dict[str, np.ndarray]]:
    """One process, the global batch, an update after every A-th step with the mean of A gradients."""
    sampler = Sampler(load_corpus(config.data, config.seed), config.data.seq_len, config.seed)
    model, steps = whole_model(config), config.train.steps
    inner = build_inner(dict(model.named_parameters()), config.train)
    losses, waiting = [], 0
    for step in range(1, steps + 1):
        inner.set_learning_rate(learning_rate(step, config.train))
        tokens = sampler.batch(step, 0, config.parallel.replicas * config.train.batch_size)
        loss = batch_loss(model, tokens)
        loss.backward()
        losses.append(loss.item())
        waiting += 1
        if waiting == config.method.accumulate or step == steps:
            for parameter in model.parameters():
                parameter.grad /= waiting
            inner.step()
            inner.zero_grad()
            waiting = 0
    return losses, named(model, list(model.parameters()))


def sign_descent(config: TrainerConfig) -> list[float]:
    """One process, the global batch, weights that move by the sign of the gradient."""
    sampler = Sampler(load_corpus(config.data, config.seed), config.data.seq_len, config.seed)
    model, losses = whole_model(config), []
    for step in range(1, config.train.steps + 1):
        model.zero_grad()
        loss = batch_loss(model, sampler.batch(step, 0, config.parallel.replicas * config.train.batch_size))
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad.sign(), alpha=learning_rate(step, config.train))
    return losses


def streaming(config: TrainerConfig) -> tuple[list[list[float]], dict[str, np.ndarray]]:
    """Fragment p starts after (p + 1) H / P of every H steps, is applied tau steps later, and merged."""
    method, size, steps = config.method, config.train.batch_size, config.train.steps
    layers = config.model.shape["layers"]
    count, period, late = method.fragments(layers), method.local_steps, method.overlap_steps
    sampler = Sampler(load_corpus(config.data, config.seed), config.data.seq_len, config.seed)
    models = [whole_model(config) for _ in range(config.parallel.replicas)]
    inners = [build_inner(dict(model.named_parameters()), config.train) for model in models]
    weights = [dict(model.named_parameters()) for model in models]
    members = [
        [name for name in weights[0] if fragment_of(name, layers, method.fragment_layers) == p]
        for p in range(count)
    ]
    theta = {name: p.detach().clone() for name, p in weights[0].items()}
    outers = [nesterov(method.outer.lr, method.outer.momentum) for _ in range(count)]
    arriving: dict[int, tuple[int, Weights]] = {}
    losses: list[list[float]] = [[] for _ in models]

    def mean_delta(p: int) -> Weights:
        return average([[theta[n] - w[n].detach() for n in members[p]] for w in weights])

    def apply(p: int, delta: Weights) -> None:
        moved = outers[p]([theta[name] for name in members[p]], delta)
        theta.update(zip(members[p], moved, strict=True))
        with torch.no_grad():
            for w in weights:
                for name in members[p]:
                    w[name].copy_(method.merge_alpha * w[name] + (1 - method.merge_alpha) * theta[name])

    for step in range(1, steps + 1):
        for i, (model, inner) in enumerate(zip(models, inners, strict=True)):
            inner.set_learning_rate(learning_rate(step, config.train))
            inner.zero_grad()
            loss = batch_loss(model, sampler.batch(step, i * size, size))
            loss.backward()
            inner.step()
            losses[i].append(loss.item())
        if step in arriving:
            apply(*arriving.pop(step))
        for p in range(count):
            first = (p + 1) * period // count
            if step >= first and (step - first) % period == 0 and step != steps:
                arriving[step + late] = (p, mean_delta(p))
    for _, (p, delta) in sorted(arriving.items()):
        apply(p, delta)
    for p in range(count):
        apply(p, mean_delta(p))
    return losses, named(models[0], [theta[name] for name in weights[0]])
