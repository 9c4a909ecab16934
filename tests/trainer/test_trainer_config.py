"""Configurations are checked when they are made, and refused in one sentence."""

import pytest
from pydantic import ValidationError

from trainer.config import TrainerConfig, apply_override, load_config
from trainer.config_errors import ConfigError, config_error_sentence

WRONG = {
    "seeed: 1": ["seeed", "unknown key", "did you mean 'seed'?"],
    "train: {lr: -1}": ["train.lr", "found -1", "greater than 0"],
    "train: {lr: .inf}": ["train.lr", "finite"],
    "train: {steps: 0}": ["train.steps", "found 0"],
    "train: {steps: true}": ["train.steps", "found True", "integer"],
    "train: 3": ["train: found 3", "mapping"],
    "parallel: {data_parallel: 4}": ["train.batch_size", "found 8", "(4) x parallel.data_parallel (4)"],
    "parallel: {data_parallel: 2}\nmethod: {name: allreduce, overlap: true}": [
        "method.overlap",
        "only false",
    ],
    "parallel: {data_parallel: 2}\nmethod: {name: noloco}": ["parallel.data_parallel", "noloco only 1"],
    "train: {batch_sizes: [8, 8]}": ["train.batch_sizes", "found 2", "parallel.replicas (1)"],
    "train: {batch_sizes: [6]}": ["train.batch_sizes", "found 6", "multiple of parallel.microbatches (4)"],
    "parallel: {replicas: 2}\ntrain: {batch_sizes: [8, 4]}\nmethod: {name: noloco}": [
        "train.batch_sizes",
        "found [8, 4]",
        "noloco equal ones",
    ],
    "train: {batch_size: 7}": ["train.batch_size", "found 7", "multiple of parallel.microbatches (4)"],
    "parallel: {schedule: 2f2b}": ["parallel.schedule", "'2f2b'", "1f1b, gpipe"],
    "parallel: {stages: 5, microbatches: 8}": ["parallel.stages", "found 5", "layers (4)"],
    "parallel: {stages: 4, microbatches: 2}": ["parallel.microbatches", "found 2", "stages (4)"],
    "parallel: {stages: 2}\nmodel: {tied: true}": ["model.tied", "parallel.stages 1"],
    "parallel: {virtual_stages: 2}": ["parallel.virtual_stages", "found 2", "only with schedule interleaved"],
    "parallel: {schedule: interleaved, stages: 4}": ["parallel.virtual_stages", "found 2", "at most 1"],
    "parallel: {schedule: interleaved, stages: 2, microbatches: 3}\ntrain: {batch_size: 6}": [
        "parallel.microbatches",
        "found 3",
        "multiple of parallel.stages",
    ],
    "train: {schedule: linear}": ["train.schedule", "'linear'", "cosine, wsd, constant"],
    "model: {preset: decoder-2m}": ["model.preset", "decoder-0.4m, decoder-1m, decoder-4m", "did you mean"],
    "model: {dim: 100}": ["model.dim", "found 100", "multiple of heads"],
    "model: {kv_heads: 4}": ["model.kv_heads", "found 4", "divisor of heads"],
    "method: {name: dilocoxx}": ["method.name", "'dilocoxx'", "did you mean 'dilocox'?"],
    "method: {local_steps: 3}": ["method.name: found nothing", "allreduce, local_sgd, diloco, opendiloco"],
    "method: {name: allreduce, local_steps: 3}": ["method.local_steps", "unknown key", "wire, collective"],
    "method: {name: diloco, outer: {name: adam}}": ["method.outer.name", "'adam'", "nesterov, sgd"],
    "method: {name: dilocox, overlap: {delay_rounds: 2}}": ["method.overlap.delay_rounds", "found 2"],
    "method: {name: dilocox, compressor: {name: lowrank-int4, rnk: 3}}": [
        "method.compressor.rnk",
        "did you mean 'rank'?",
    ],
    "method: {name: dilocox, compressor: {name: lowrank, rank: 0}}": ["method.compressor.rank", "found 0"],
    "method: {name: dilocox, compressor: {name: lowrank, rank: 3, min_rank: 5}}": [
        "method.compressor.rank",
        "found 3",
        "min_rank 5",
    ],
    "compute: {mode: paced}": ["compute.step_s", "found nothing"],
    "data: {source: markov, tokenizer: bpe}": ["data.tokenizer", "'bpe'", "'bytes'"],
    "parallel: {on_replica_loss: continue, data_parallel: 2}\nmethod: {name: diloco}": ["one rank a stage"],
    "parallel: {on_replica_loss: continue}": ["parallel.on_replica_loss", "allreduce", "dilocox"],
    "parallel: {on_replica_loss: continue}\nmethod: {name: dilocox, overlap: {delay_rounds: 1, progress: eager}}": [
        "parallel.on_replica_loss",
        "eager",
    ],
    "parallel: {on_replica_loss: continue}\nmethod: {name: diloco}\ncheckpoint: {every_rounds: 2}": [
        "checkpoint"
    ],
    "checkpoint: {every_rounds: 2, every_steps: 3}": ["checkpoint.every_steps", "one of the two"],
    "[1, 2]": ["found list at the top"],
    "a: [": ["not YAML"],
}


@pytest.mark.parametrize(("text", "parts"), WRONG.items(), ids=WRONG.keys())
def test_a_wrong_file_is_refused_in_one_sentence_with_file_key_found_and_allowed(tmp_path, text, parts):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    sentence = str(refused.value)
    assert sentence.startswith(f"{file}: ") and "\n" not in sentence
    for part in parts:
        assert part.strip("'") in sentence, sentence


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.yaml: cannot be read: No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_several_problems_are_counted(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train: {steps: 0, lr: -1}")
    with pytest.raises(ConfigError, match="and 1 more problem"):
        load_config(file)


def test_the_contracts_example_is_read(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        """
name: dilocox-h20
topology: topologies/two-sites-1gbps.yaml
seed: 0
model: {preset: decoder-1m}
data: {source: pydoc-topics, tokenizer: bytes, seq_len: 128}
parallel: {replicas: 2, stages: 2, microbatches: 4, schedule: 1f1b}
train: {steps: 160, batch_size: 8, lr: 1.0e-3, warmup_steps: 40, dtype: fp32}
method:
  name: dilocox
  local_steps: 20
  overlap: {delay_rounds: 1, progress: keep}
  compressor: {name: lowrank-int4, rank: 32, adaptive: true, block: 128, error_feedback: true}
  outer: {name: nesterov, lr: 0.7, momentum: 0.9}
compute: {mode: paced, step_s: 0.35}
eval: {every: 50}
"""
    )
    config = load_config(file, ["method.local_steps=10", "train.lr=2e-3"])
    assert config.method.local_steps == 10
    assert config.train.lr == 2e-3
    assert config.tokens_per_step == 2 * 8 * 128
    assert load_config(file).method.local_steps == 20


def test_a_resolved_configuration_is_the_same_configuration():
    config = TrainerConfig.model_validate({"method": {"name": "dilocox"}, "compute": {"mode": "real"}})
    assert TrainerConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_subclass_may_add_keys():
    class RunConfig(TrainerConfig):
        name: str
        topology: str = "loopback"

    assert RunConfig(name="x").train == TrainerConfig().train
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate({"name": "x", "topolgy": "y"})
    assert "did you mean 'topology'?" in config_error_sentence(refused.value, "run.yaml", RunConfig)


def test_overrides_make_their_way_or_say_why_not():
    data = {"train": {"steps": 3}}
    apply_override(data, "method.outer.lr=0.5")
    assert data == {"train": {"steps": 3}, "method": {"outer": {"lr": 0.5}}}
    for wrong in ("train.steps", "=3", "train..lr=3", "train.steps.x=1", "train.lr=["):
        with pytest.raises(ConfigError, match="--set"):
            apply_override(data, wrong)


def test_configurations_are_frozen():
    with pytest.raises(ValidationError):
        TrainerConfig().seed = 3
