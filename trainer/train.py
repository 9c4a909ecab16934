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

from trainer.checkpoint import FOLDER, Checkpoints
from trainer.collectives import Exchange
from trainer.config import TrainerConfig
from trainer.data import BYTE_VOCAB, Corpus, Sampler, evaluation_windows
from trainer.evaluate import Evaluator, bits_per_byte
from trainer.inner import build_inner, clip_gradients, learning_rate
from trainer.methods import Context, ExchangeError, RoundRecord, build_method
from trainer.methods.base import copy_into
from trainer.metrics import (
    BUCKETS,
    EVALUATION,
    SETUP,
    JsonLines,
    Ledger,
    difference,
    training_s,
    whole_lines_bytes,
    write_json,
)
from trainer.model import Shape, build_pieces, canonical_name, count_parameters
from trainer.pipeline import Pipeline
from trainer.progress import Progress
from trainer.ranks import World
from trainer.resume import Resumed, describe
from trainer.sockets import kernel_sent
from trainer.state import State, take_tensors
from trainer.survive import Survivors
from trainer.weights import load_initial, write_weights


class TrainingError(RuntimeError):
    """A step failed; the message names rank and step."""


class Trainer:
    """Trains stage `world.stage` of replica `world.replica`; every rank runs one.

    Writes into `out`/ranks: steps, rounds and evaluations as JSON lines while it runs, the summary at
    the end.
    """

    def __init__(
        self,
        config: TrainerConfig,
        world: World,
        corpus: Corpus,
        out: Path,
        *,
        resumed: Resumed | None = None,
        survivors: Survivors | None = None,
    ) -> None:
        self.survivors = survivors
        self.config, self.world, self.corpus, self.out = config, world, corpus, out
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
        load_initial(self.parameters, config.model.init_from, resumed.weights if resumed else None)
        self.sampler = Sampler(corpus, config.data.seq_len, config.seed)
        self.pipeline = Pipeline(self.pieces, world, config, self.ledger)
        windows = torch.from_numpy(evaluation_windows(corpus, config))
        self.evaluator = Evaluator(self.pieces, world, windows, self.ledger)
        self.wan = world.wan("exposed_comm_s")
        self.lan = Exchange(world.pipeline, "bubble_s")
        self.inner = build_inner(self.parameters, config.train)
        self.context = Context(
            world.rank,
            self.parameters,
            self.wan,
            self.lan,
            self.ledger,
            self._report_round,
            config.seed,
            config.parallel.microbatches,
            config.weight(world.replica),
            config.model.shape["layers"],
            self.pipeline.computed,
            survivors,
        )
        self.method = build_method(config, self.context)
        self.progress = resumed.progress if resumed else Progress()
        self.incomplete = resumed.incomplete if resumed else None
        self.carried = dict(self.progress.payload_bytes)  # sent by earlier processes
        self.steps_file, self.rounds_file = self._records("steps"), self._records("rounds")
        self.evals_file = self._records("evals") if self.lead and self.pipeline.is_last else None
        keep = config.checkpoint.keep
        self.checkpoints = Checkpoints(out / FOLDER, world.rank, keep, world.control.barrier)
        self.overran_before = 0
        self.between_rounds = resumed is not None and resumed.state is not None
        if resumed is not None and resumed.state is not None:
            self._load_state_dict(resumed.state)
        if survivors is not None:
            self._take_seat(survivors)
        self.seconds = self.ledger.read()  # as of the last record
        self.began_epoch = 0.0

    def _records(self, kind: str) -> JsonLines:
        path = self._path(f"{kind}.jsonl")
        if self.survivors is not None and self.survivors.newcomer:
            return JsonLines(path, whole_lines_bytes(path))
        return JsonLines(path, self.progress.file_bytes.get(path.name, 0))

    @property
    def lead(self) -> bool:
        """Whether this rank validates and writes the weights, for its stage."""
        return self.survivors.lead if self.survivors else self.world.speaks

    @property
    def tokens_per_step(self) -> int:
        """Of all replicas that are alive."""
        config = self.config
        if self.survivors is None:
            return config.tokens_per_step
        alive = self.survivors.membership.latest.members
        return sum(config.batch_sizes[replica] for replica in alive) * config.data.seq_len

    def _take_seat(self, survivors: Survivors) -> None:
        """Connect to the others; a newcomer takes over where they are."""
        if not survivors.newcomer:
            survivors.connect(self.wan)
            return
        state = survivors.take_over(self.wan, self.ledger)
        self.method.begin_as_newcomer(state["method"])
        progress = Progress.from_state(state["progress"])
        self.progress.step, self.progress.tokens = progress.step, progress.tokens
        self.progress.synchronisations, self.progress.evaluated_at = (
            progress.synchronisations,
            progress.evaluated_at,
        )
        self.between_rounds = True
        print(f"replica {self.world.replica} is back after step {progress.step}", flush=True)

    def _let_in(self, survivors: Survivors) -> None:
        """Between two rounds: whoever came back gets the outer state and the schedule."""
        with self.ledger.span("exposed_comm_s"):
            outcome = survivors.membership.meet(admits=True)
            if outcome.joined:
                state = {"method": self.method.state_dict(), "progress": self.progress.state_dict()}
                survivors.hand_over(outcome, self.wan, state, self.ledger)
            survivors.heed(outcome)

    def _path(self, suffix: str) -> Path:
        return self.out / "ranks" / f"rank-{self.world.rank}.{suffix}"

    def run(self) -> dict[str, Any]:
        """Train to the end; returns the summary that was also written.

        Raises:
            ExchangeError: an exchange between replicas failed.
            TrainingError: anything else in a step did, a lost neighbour for example.
        """
        with self.ledger.span("other_s"):
            if self.progress.step == 0:
                self._evaluate(step=0)
            self.began_epoch = time.time() - training_s(self.ledger.read())
            for step in range(self.progress.step + 1, self.config.train.steps + 1):
                try:
                    self._step(step)
                except ExchangeError:
                    raise  # names rank and round
                except RuntimeError as error:
                    raise TrainingError(f"rank {self.world.rank}, step {step}: {error}") from error
            self.checkpoints.close()
            if self.config.checkpoint.weights:
                write_weights(
                    self.out, self.world, self.method.outer_parameters, self._about_weights(), lead=self.lead
                )
        self.world.control.barrier()  # everybody has received everything: the kernel's counts are final
        summary = self._summary()
        for file in (self.steps_file, self.rounds_file, self.evals_file):
            if file is not None:
                file.close()
        write_json(self._path("summary.json"), summary)
        return summary

    def _step(self, step: int) -> None:
        config, ledger = self.config, self.ledger
        before_bytes = dict(self.progress.payload_bytes)
        if self.between_rounds:
            self.method.open_round()
            self.between_rounds = False
        last = step == config.train.steps
        lr = learning_rate(step, config.train)
        self.inner.set_learning_rate(lr)
        batch = self.sampler.batch(step, *config.sequences(self.world.replica, self.world.member))
        loss = self.pipeline.step(torch.from_numpy(batch))
        if self.method.updates_after(step, last=last):
            self.progress.planned_bytes += self.method.planned_step_bytes()
            if self.world.cluster is not None:
                self.world.cluster.average_gradients(list(self.parameters.values()), ledger)
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
            self.between_rounds = not last
            self.progress.synchronisations += 1
        before, self.seconds = self.seconds, ledger.read()
        progress = self.progress
        progress.step, progress.last_loss = step, loss
        progress.tokens += self.tokens_per_step
        progress.payload_bytes = self._payload_bytes()
        self.steps_file.write(
            {
                "rank": self.world.rank,
                "step": step,
                "tokens": progress.tokens,
                "t": training_s(self.seconds),
                "loss": loss,
                "lr": lr,
                **_buckets(difference(self.seconds, before)),
                "payload_bytes": progress.payload_bytes["wan"] - before_bytes["wan"],
                "lan_payload_bytes": progress.payload_bytes["lan"] - before_bytes["lan"],
            }
        )
        if self.between_rounds and self.survivors is not None:
            self._let_in(self.survivors)
        if self.between_rounds and self._checkpoint_due():
            with ledger.span("checkpoint_s"):
                self._checkpoint()

    def _payload_bytes(self) -> dict[str, int]:
        """Handed to the transport so far, earlier processes of this rank included."""
        cluster = self.world.cluster
        sent = {
            "wan": self.wan.sent_bytes,
            "lan": self.pipeline.sent_bytes + self.lan.sent_bytes + (cluster.sent_bytes if cluster else 0),
            "evaluation": self.evaluator.sent_bytes,
        }
        return {kind: self.carried[kind] + count for kind, count in sent.items()}

    def _checkpoint_due(self) -> bool:
        config, progress = self.config.checkpoint, self.progress
        if config.every_rounds is not None:
            return progress.synchronisations % config.every_rounds == 0
        every = config.every_steps
        return every is not None and progress.step // every > progress.checkpointed_at // every

    def _checkpoint(self) -> None:
        """Copy the state and let it be written in the background."""
        self.checkpoints.settle()
        progress = self.progress
        progress.checkpointed_at = progress.step
        progress.seconds = self.seconds
        progress.overran_steps = self._overran_steps()
        files = [file for file in (self.steps_file, self.rounds_file, self.evals_file) if file is not None]
        progress.file_bytes = {file.name: file.size() for file in files}
        self.checkpoints.save(progress.step, self._state_dict(), [file.flush_to_disk for file in files])

    def _state_dict(self) -> State:
        replica, outer = self.world.replica, self.method.outer_parameters
        return {
            "about": describe(self.config, self.corpus.sha256),
            "progress": self.progress.state_dict(),
            "model": dict(self.parameters),
            "inner": self.inner.state_dict(self.parameters),
            "method": self.method.state_dict(),
            "weights": {canonical_name(n): p for n, p in outer.items()} if replica == 0 else {},
            "rng": torch.get_rng_state(),
        }

    def _load_state_dict(self, state: State) -> None:
        copy_into(self.context.parameters, take_tensors("model", state["model"], self.parameters))
        self.inner.load_state_dict(self.parameters, state["inner"])
        self.method.load_state_dict(state["method"])
        torch.set_rng_state(state["rng"])
        self.ledger.carry_on(self.progress.seconds)
        self.overran_before = self.progress.overran_steps

    def _overran_steps(self) -> int:
        pacer = self.pipeline.pacer
        return self.overran_before + (pacer.overran_steps if pacer else 0)

    def _evaluation_due(self, step: int) -> bool:
        """Whether a multiple of `eval.every` has passed since the last evaluation."""
        every = self.config.eval.every
        return step // every > self.progress.evaluated_at // every

    def _evaluate(self, step: int) -> None:
        """Validate the outer parameters while everybody waits; none of it is training time."""
        trained_s = training_s(self.ledger.read()) if step else 0.0
        with self.ledger.span(EVALUATION):
            self.progress.evaluated_at = step
            self.world.control.barrier()
            if self.lead:
                with self.method.evaluating():
                    loss = self.evaluator.loss()
                if loss is not None:
                    self.evals_file = self.evals_file or self._records("evals")
                    self.progress.last_validation = loss
                    record = {
                        "step": step,
                        "tokens": self.progress.tokens + (self.tokens_per_step if step else 0),
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
        self.progress.rounds += 1
        self.progress.planned_bytes += record.planned_bytes
        self.rounds_file.write({"rank": self.world.rank, **asdict(record)})

    def _about_weights(self) -> dict[str, Any]:
        return {
            "shape": asdict(self.shape),
            "seq_len": self.config.data.seq_len,
            "tokenizer": self.config.data.tokenizer,
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "data_sha256": self.corpus.sha256,
        }

    def _summary(self) -> dict[str, Any]:
        world, config, corpus = self.world, self.config, self.corpus
        validation = self.progress.last_validation
        return {
            "rank": world.rank,
            "replica": world.replica,
            "stage": world.stage,
            "status": "done",
            "params_total": count_parameters(self.shape),
            "params_stage": sum(parameter.numel() for parameter in self.parameters.values()),
            "steps": config.train.steps,
            "tokens": self.progress.tokens,
            "began_epoch": self.began_epoch,  # wall clock at the first step, to lay other clocks beside
            "wall_s": training_s(self.seconds),
            "eval_s": self.seconds[EVALUATION],
            **_buckets(self.seconds),
            "payload_bytes": self.progress.payload_bytes,
            "wan_congestion_control": world.links.congestion_control if world.links is not None else [],
            "wan_framing_bytes": self.wan.framing_bytes,  # by this process, headers of the transport
            "incomplete": self.incomplete,
            "members": list(self.survivors.members)
            if self.survivors
            else list(range(config.parallel.replicas)),
            "carried_payload_bytes": self.carried,  # of these, what processes before this one sent
            "rounds": self.progress.rounds,
            "planned_wan_bytes": self.progress.planned_bytes,
            "overran_steps": self._overran_steps(),
            "final_loss": self.progress.last_loss,
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
