"""What a training run is: one frozen, typed value, checked when it is made.

Every default of the trainer lives here and nowhere else. `TrainerConfig` may be subclassed by a
package that adds its own top-level keys; `load_config` ignores such keys (`FOREIGN_KEYS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from trainer.config_base import Count, CountOrZero, PositiveSeconds, Section, Share
from trainer.config_errors import ConfigError, config_error_sentence, did_you_mean
from trainer.method_config import AllReduceConfig, MethodConfig
from trainer.model_presets import PRESETS

SURVIVING_METHODS = ("local_sgd", "diloco", "opendiloco", "dilocox")
"""Methods that can go on without a replica: all replicas hold the same outer state after every round."""

FOREIGN_KEYS = frozenset({"name", "topology"})
"""Top-level keys of a run that belong to whoever launches the trainer."""


class ModelConfig(Section):
    """A named size, with single fields overridden where they are given.

    `init_from`: weights to start from instead of seeded ones; see `trainer.weights.read_weights`.
    """

    preset: str = "decoder-1m"
    dim: Count | None = None
    layers: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    ffn: Count | None = None
    tied: bool = False
    qkv_bias: bool = False
    init_from: str | None = None

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.preset not in PRESETS:
            raise ValueError(
                f"preset: found {self.preset!r}, allowed {', '.join(PRESETS)}{did_you_mean(self.preset, PRESETS)}"
            )
        shape = self.shape
        if shape["dim"] % shape["heads"]:
            raise ValueError(
                f"dim: found {shape['dim']}, allowed a multiple of heads (heads is {shape['heads']})"
            )
        if (shape["dim"] // shape["heads"]) % 2:
            raise ValueError(
                f"heads: found {shape['heads']}, allowed a count that leaves each head an even width for its "
                f"rotary pairs (dim is {shape['dim']})"
            )
        if shape["heads"] % shape["kv_heads"]:
            raise ValueError(
                f"kv_heads: found {shape['kv_heads']}, allowed a divisor of heads (heads is {shape['heads']})"
            )
        return self

    @property
    def shape(self) -> dict[str, int]:
        """`dim`, `layers`, `heads`, `kv_heads`, `ffn` after preset and overrides."""
        base = PRESETS[self.preset]
        heads = self.heads or base["heads"]
        default_kv_heads = heads if self.heads else base["kv_heads"]
        return {
            "dim": self.dim or base["dim"],
            "layers": self.layers or base["layers"],
            "heads": heads,
            "kv_heads": self.kv_heads or default_kv_heads,
            "ffn": self.ffn or base["ffn"],
        }


class DataConfig(Section):
    """Where the text comes from; `holdout` is the share of documents kept for validation."""

    source: str = "pydoc-topics"
    tokenizer: Literal["bytes"] = "bytes"
    seq_len: Annotated[int, Field(ge=2, strict=True)] = 128
    holdout: Share = 0.1


class ParallelConfig(Section):
    """D replicas of M pipeline stages; a replica's batch is cut into `microbatches`.

    `data_parallel`: each stage of a replica is so many ranks, which share the replica's batch and average
    gradients over its LAN in every step (the paper's clusters: 2 of 8 stages with 2 ranks each).

    `schedule: interleaved` gives every rank `virtual_stages` pieces of the model instead of one
    (arXiv:2104.04473, section 2.2): smaller bubbles, more hops.

    `on_replica_loss: continue` needs a coordinator (`trainer.coordinator`), for which a rank that is silent
    for `silence_s` is lost.
    """

    replicas: Count = 1
    stages: Count = 1
    data_parallel: Count = 1
    microbatches: Count = 4
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    on_replica_loss: Literal["fail", "continue"] = "fail"
    silence_s: PositiveSeconds = 10.0
    virtual_stages: Annotated[int, Field(ge=2, le=16, strict=True)] | None = None

    @property
    def ranks(self) -> int:
        """How many processes there are: replicas x data_parallel x stages."""
        return self.replicas * self.data_parallel * self.stages

    @property
    def pieces(self) -> int:
        """Pieces of the model that each rank holds: 1 unless the schedule is interleaved."""
        return (self.virtual_stages or 2) if self.schedule == "interleaved" else 1


class TrainConfig(Section):
    """The inner optimisation; `batch_size` is sequences per replica and step.

    `batch_sizes` gives every replica its own instead; averages are then weighted by tokens.

    The learning rate warms up over `warmup_steps`, then follows `schedule`: a cosine to
    `min_lr_ratio` x lr; warm-up, stable, decay (wsd: constant, then linearly to that floor over the last
    `decay_share` of the steps; arXiv:2404.06395, with a linear decay); or constant.
    """

    steps: Count = 160
    batch_size: Count = 8
    batch_sizes: Annotated[list[Count], Field(min_length=1)] | None = None
    lr: Annotated[float, Field(gt=0)] = 1.0e-3
    warmup_steps: CountOrZero = 40
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    dtype: Literal["fp32", "bf16"] = "fp32"
    inner: Literal["adamw", "muon", "sgd"] = "adamw"
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    grad_clip: Annotated[float, Field(ge=0)] = 0.0
    timeout_s: PositiveSeconds = 120.0


class PacedCompute(Section):
    """Train for real, and stretch each microbatch so that a whole step takes `step_s` seconds.

    `pace` is a factor on it for each rank, for hardware that differs; empty is 1 everywhere.
    """

    mode: Literal["paced"]
    step_s: PositiveSeconds
    pace: tuple[Annotated[float, Field(gt=0)], ...] = ()


class RealCompute(Section):
    """Whatever time this machine takes."""

    mode: Literal["real"] = "real"


ComputeConfig = Annotated[PacedCompute | RealCompute, Field(discriminator="mode")]


class EvalConfig(Section):
    """Validate at the first synchronisation at or after every `every` steps, on `tokens` tokens.

    `part: tuning` takes windows of the held-out text that lie between those of `validation`, so that
    settings can be chosen on text that no reported loss is measured on.
    """

    every: Count = 50
    tokens: Count = 16384
    part: Literal["validation", "tuning"] = "validation"


class CheckpointConfig(Section):
    """Keep everything at the first synchronisation in or after every so many rounds, or steps; neither: never.

    `keep` is how many whole checkpoints stay. `weights` writes the final outer parameters.
    """

    every_rounds: Count | None = None
    every_steps: Count | None = None
    keep: Count = 2
    weights: bool = True

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        if self.every_rounds is not None and self.every_steps is not None:
            raise ValueError("every_steps: found it beside every_rounds, allowed one of the two")
        return self


class TrainerConfig(Section):
    """Everything that decides a training run.

    Raises:
        pydantic.ValidationError: `config_error_sentence` turns it into one sentence.
    """

    seed: CountOrZero = 0
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    method: MethodConfig = AllReduceConfig()
    compute: ComputeConfig = RealCompute()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _batches_fit(self) -> TrainerConfig:
        p, t = self.parallel, self.train
        pace = self.compute.pace if isinstance(self.compute, PacedCompute) else ()
        if pace and len(pace) != p.ranks:
            raise ValueError(
                f"compute.pace: found {len(pace)} factors, allowed one for each of the {p.ranks} ranks"
            )
        if t.batch_sizes is not None and len(t.batch_sizes) != p.replicas:
            raise ValueError(
                f"train.batch_sizes: found {len(t.batch_sizes)} of them, allowed one for each of "
                f"parallel.replicas ({p.replicas})"
            )
        if len(set(self.batch_sizes)) > 1 and self.method.name == "noloco":
            raise ValueError(
                f"train.batch_sizes: found {t.batch_sizes}, allowed with method noloco equal ones only (its pairs "
                f"have no common weights)"
            )
        for size in self.batch_sizes:
            if size % (p.microbatches * p.data_parallel):
                key = "batch_size" if t.batch_sizes is None else "batch_sizes"
                by = f" x parallel.data_parallel ({p.data_parallel})" if p.data_parallel > 1 else ""
                raise ValueError(
                    f"train.{key}: found {size}, allowed a multiple of parallel.microbatches "
                    f"({p.microbatches}){by}"
                )
        return self

    @model_validator(mode="after")
    def _method_knows_data_parallel_ranks(self) -> TrainerConfig:
        p = self.parallel
        if p.data_parallel > 1 and self.method.name in ("noloco", "powersgd"):
            raise ValueError(
                f"parallel.data_parallel: found {p.data_parallel}, allowed with method {self.method.name} only 1"
            )
        if p.data_parallel > 1 and self.method.name == "allreduce" and self.method.overlap:
            raise ValueError(
                f"method.overlap: found true, allowed with parallel.data_parallel {p.data_parallel} only false "
                f"(gradients are averaged over the LAN first, after backward)"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> TrainerConfig:
        p = self.parallel
        layers = self.model.shape["layers"]
        if p.stages > layers:
            raise ValueError(
                f"parallel.stages: found {p.stages}, allowed at most the model's layers ({layers})"
            )
        if p.virtual_stages is not None and p.schedule != "interleaved":
            raise ValueError(
                f"parallel.virtual_stages: found {p.virtual_stages}, allowed only with schedule interleaved "
                f"(it is {p.schedule})"
            )
        if p.stages * p.pieces > layers:
            raise ValueError(
                f"parallel.virtual_stages: found {p.pieces}, allowed at most {layers // p.stages} with "
                f"{p.stages} stages and {layers} layers"
            )
        if p.schedule == "interleaved" and (p.stages == 1 or p.microbatches % p.stages):
            raise ValueError(
                f"parallel.microbatches: found {p.microbatches}, allowed with schedule interleaved a multiple of "
                f"parallel.stages, which must be at least 2 (it is {p.stages})"
            )
        self.method.check_run(layers, self.train.inner)
        if p.schedule == "1f1b" and p.microbatches < p.stages:
            raise ValueError(
                f"parallel.microbatches: found {p.microbatches}, allowed at least parallel.stages ({p.stages}) "
                f"with schedule 1f1b"
            )
        if self.model.tied and p.stages > 1:
            raise ValueError(
                f"model.tied: found true, allowed only with parallel.stages 1 (stages is {p.stages}: embedding "
                f"and head would lie on different ranks)"
            )
        return self

    @model_validator(mode="after")
    def _check_survival(self) -> TrainerConfig:
        if self.parallel.on_replica_loss == "fail":
            return self
        if self.method.name not in SURVIVING_METHODS or self._is_eager():
            raise ValueError(
                f"parallel.on_replica_loss: found continue with method {self.method.name}, allowed with "
                f"{', '.join(SURVIVING_METHODS)} (not with eager progress)"
            )
        if self.parallel.data_parallel > 1 or len(set(self.batch_sizes)) > 1:
            raise ValueError(
                "parallel.on_replica_loss: found continue, allowed with one rank a stage and equal batches only"
            )
        if self.checkpoint.every_rounds or self.checkpoint.every_steps:
            raise ValueError(
                "checkpoint: found a period beside parallel.on_replica_loss continue, allowed one of the two"
            )
        return self

    def _is_eager(self) -> bool:
        overlap = getattr(self.method, "overlap", None)
        return overlap is not None and overlap.delay_rounds > 0 and overlap.progress == "eager"

    @property
    def batch_sizes(self) -> list[int]:
        """Sequences per step of each replica."""
        return self.train.batch_sizes or [self.train.batch_size] * self.parallel.replicas

    def weight(self, replica: int) -> float:
        """The replica's share of all tokens, times the number of replicas: 1 where batches are equal."""
        return self.batch_sizes[replica] * self.parallel.replicas / sum(self.batch_sizes)

    def microbatch_size(self, replica: int) -> int:
        """Sequences per microbatch of each data-parallel rank of a replica."""
        return self.batch_sizes[replica] // (self.parallel.microbatches * self.parallel.data_parallel)

    def sequences(self, replica: int, member: int) -> tuple[int, int]:
        """(first, count) of a data-parallel rank's sequences in the global batch of a step."""
        count = self.batch_sizes[replica] // self.parallel.data_parallel
        return sum(self.batch_sizes[:replica]) + member * count, count

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all replicas together train on in one step."""
        return sum(self.batch_sizes) * self.data.seq_len


def apply_override(data: dict[str, Any], assignment: str) -> None:
    """Set one dotted key in place: `method.local_steps=10`; the value is read as YAML.

    Raises:
        ConfigError: not of the form KEY=VALUE, or a key on the way is not a mapping.
    """
    dotted, equals, text = assignment.partition("=")
    if not equals or not all(dotted.split(".")):
        raise ConfigError(f"--set: found {assignment!r}, allowed KEY=VALUE such as method.local_steps=10")
    *parents, last = dotted.split(".")
    node = data
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {dotted}: {parent!r} holds {child!r}, allowed only keys of a mapping")
        node = child
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {dotted}: found {text!r}, allowed one YAML value") from error


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainerConfig:
    """Read, override and check a YAML configuration; `FOREIGN_KEYS` are ignored.

    Raises:
        ConfigError: unreadable, not YAML, or not allowed; its text is one sentence.
    """
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: found {type(data).__name__} at the top, allowed a mapping of keys")
    for assignment in overrides:
        apply_override(data, assignment)
    own = {key: value for key, value in data.items() if key not in FOREIGN_KEYS}
    try:
        return TrainerConfig.model_validate(own)
    except ValidationError as error:
        raise ConfigError(config_error_sentence(error, path, TrainerConfig)) from error
