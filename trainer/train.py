"""One rank's training run, from connected world to summary."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trainer.collectives import Exchange
from trainer.config import TrainerConfig
from trainer.data import BYTE_VOCAB, Corpus, Sampler, evaluation_windows
from trainer.evaluate import Evaluator, bits_per_byte
from trainer.inner import build_inner, clip_gradients, learning_rate
from trainer.methods import Context, ExchangeError, RoundRecord, build_method
from trainer.metrics import BUCKETS, EVALUATION, SETUP, JsonLines, Ledger, difference, training_s, write_json
from trainer.model import Shape, build_pieces, count_parameters
from trainer.pipeline import Pipeline
from trainer.ranks import World
from trainer.sockets import kernel_sent


class TrainingError(RuntimeError):
    """A step failed; the message names rank and step."""


class Trainer:
    """Trains stage `world.stage` of replica `world.replica`; every rank runs one.

    Writes into `out`/ranks: steps, rounds and evaluations as JSON lines while it runs, the summary at
    the end.
    """

    def __init__(self, config: TrainerConfig, world: World, corpus: Corpus, out: Path) -> None:
        self.config, self.world, self.corpus = config, world, corpus
        self.ledger = Ledger(SETUP)
        self.shape = Shape.of(config.model, BYTE_VOCAB)
        self.pieces = build_pieces(
            self.shape,
            config.parallel,
            world.stage,
            config.data.seq_len,
            config.seed,
            autocast_bf16=config.train.dtype == "bf16",
        )
        self.parameters = {name: p for piece in self.pieces for name, p in piece.named_parameters()}
        self.sampler = Sampler(corpus, config.data.seq_len, config.seed)
        self.pipeline = Pipeline(self.pieces, world, config, self.ledger)
        windows = torch.from_numpy(evaluation_windows(corpus, config))
        self.evaluator = Evaluator(self.pieces, world, windows, self.ledger)
        self.wan = Exchange(world.stage_peers, "exposed_comm_s")
        self.lan = Exchange(world.pipeline, "bubble_s")
        self.inner = build_inner(self.parameters, config.train)
        self.context = Context(
            world.rank, self.parameters, self.wan, self.lan, self.ledger, self._report_round
        )
        self.method = build_method(config, self.context)
        self.folder = out / "ranks"
        self.steps_file = JsonLines(self._path("steps.jsonl"))
        self.rounds_file = JsonLines(self._path("rounds.jsonl"))
        writes_evals = world.replica == 0 and self.pipeline.is_last
        self.evals_file = JsonLines(self._path("evals.jsonl")) if writes_evals else None
        self.rounds = self._evaluated_at = 0
        self.seconds = self.ledger.read()  # as of the last record
        self.began_epoch = 0.0
        self.last_loss: float | None = None
        self.last_validation: float | None = None

    def _path(self, suffix: str) -> Path:
        return self.folder / f"rank-{self.world.rank}.{suffix}"

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the summary that was also written.

        Raises:
            ExchangeError: an exchange between replicas failed.
            TrainingError: anything else in a step did, a lost neighbour for example.
        """
        with self.ledger.span("other_s"):
            self._evaluate(step=0)
            self.began_epoch = time.time()
            for step in range(1, self.config.train.steps + 1):
                try:
                    self._step(step)
                except ExchangeError:
                    raise  # names rank and round
                except RuntimeError as error:
                    raise TrainingError(f"rank {self.world.rank}, step {step}: {error}") from error
        self.world.control.barrier()  # everybody has received everything: the kernel's counts are final
        summary = self._summary()
        for file in (self.steps_file, self.rounds_file, self.evals_file):
            if file is not None:
                file.close()
        write_json(self._path("summary.json"), summary)
        return summary

    def _step(self, step: int) -> None:
        config, ledger = self.config, self.ledger
        wan_before, lan_before = self.wan.sent_bytes, self._lan_bytes()
        last = step == config.train.steps
        lr = learning_rate(step, config.train)
        self.inner.set_learning_rate(lr)
        batch_size = config.train.batch_size
        batch = self.sampler.batch(step, self.world.replica * batch_size, batch_size)
        loss = self.pipeline.step(torch.from_numpy(batch))
        self.method.average_gradients()
        if config.train.grad_clip > 0:
            clip_gradients(self.parameters.values(), config.train.grad_clip, self.lan, ledger)
        self.inner.step()
        self.inner.zero_grad()
        if self.method.synchronises_after(step, last=last):
            self.method.close_round(step)
            if last:
                self.method.drain(step)
            if last or self._evaluation_due(step):
                self._evaluate(step)
            if not last:
                self.method.open_round()
        self.last_loss = loss
        before, self.seconds = self.seconds, ledger.read()
        self.steps_file.write(
            {
                "rank": self.world.rank,
                "step": step,
                "tokens": step * config.tokens_per_step,
                "t": training_s(self.seconds),
                "loss": loss,
                "lr": lr,
                **_buckets(difference(self.seconds, before)),
                "payload_bytes": self.wan.sent_bytes - wan_before,
                "lan_payload_bytes": self._lan_bytes() - lan_before,
            }
        )

    def _lan_bytes(self) -> int:
        return self.pipeline.sent_bytes + self.lan.sent_bytes

    def _evaluation_due(self, step: int) -> bool:
        """Whether a multiple of `eval.every` has passed since the last evaluation."""
        every = self.config.eval.every
        return step // every > self._evaluated_at // every

    def _evaluate(self, step: int) -> None:
        """Validate the outer parameters while everybody waits; none of it is training time."""
        trained_s = training_s(self.ledger.read()) if step else 0.0
        with self.ledger.span(EVALUATION):
            self._evaluated_at = step
            self.world.control.barrier()
            if self.world.replica == 0:
                with self.method.evaluating():
                    loss = self.evaluator.loss()
                if loss is not None and self.evals_file is not None:
                    self.last_validation = loss
                    record = {
                        "step": step,
                        "tokens": step * self.config.tokens_per_step,
                        "t": trained_s,
                        "val_loss": loss,
                        "val_bpb": bits_per_byte(loss),
                    }
                    self.evals_file.write(record)
                    print(
                        f"step {step}: validation {loss:.4f} nats/token after {trained_s:.1f} s", flush=True
                    )
            self.world.control.barrier()

    def _report_round(self, record: RoundRecord) -> None:
        self.rounds += 1
        self.rounds_file.write({"rank": self.world.rank, **asdict(record)})

    def _summary(self) -> dict[str, Any]:
        world, config, corpus = self.world, self.config, self.corpus
        validation = self.last_validation
        return {
            "rank": world.rank,
            "replica": world.replica,
            "stage": world.stage,
            "status": "done",
            "params_total": count_parameters(self.shape),
            "params_stage": sum(parameter.numel() for parameter in self.parameters.values()),
            "steps": config.train.steps,
            "tokens": config.train.steps * config.tokens_per_step,
            "began_epoch": self.began_epoch,  # wall clock at the first step, to lay other clocks beside
            "wall_s": training_s(self.seconds),
            "eval_s": self.seconds[EVALUATION],
            **_buckets(self.seconds),
            "payload_bytes": {
                "wan": self.wan.sent_bytes,
                "lan": self._lan_bytes(),
                "evaluation": self.evaluator.sent_bytes,
            },
            "rounds": self.rounds,
            "overran_steps": self.pipeline.pacer.overran_steps if self.pipeline.pacer else 0,
            "final_loss": self.last_loss,
            "val_loss": validation,
            "val_bpb": None if validation is None else bits_per_byte(validation),
            "data": {
                "source": corpus.source,
                "sha256": corpus.sha256,
                "train_tokens": len(corpus.train),
                "holdout_tokens": len(corpus.holdout),
                "entropy_floor": corpus.entropy_floor,
            },
            "outer_hash": self.method.outer_hash(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "kernel_sent": kernel_sent(world.master_port),
        }


def _buckets(seconds: Mapping[str, float]) -> dict[str, float]:
    return {bucket: seconds[bucket] for bucket in BUCKETS}
