"""Exported weights: `transformers` computes the logits that we do."""

import json

import pytest
import torch
from typer.testing import CliRunner

from experiments.cli import app, main
from trainer.config import TrainerConfig
from trainer.model import Shape, build_stage
from trainer.weights import load_weights, read_weights

LLAMA = {"name": "allreduce"}
MODELS = {
    "llama": {},
    "grouped queries": {"heads": 4, "kv_heads": 2},
    "qwen2": {"heads": 4, "kv_heads": 2, "qkv_bias": True},
    "tied": {"tied": True},
}


def our_logits(run, tokens):
    config = TrainerConfig.model_validate(run.config)
    module = build_stage(Shape.of(config.model, 256), 0, 1, config.data.seq_len, config.seed)
    load_weights(dict(module.named_parameters()), read_weights(run.folder), run.folder)
    with torch.no_grad():
        return module(tokens)


@pytest.mark.parametrize("model", MODELS)
def test_transformers_computes_our_logits(runs, tmp_path, model):
    transformers = pytest.importorskip("transformers")
    stages = 1 if model == "tied" else 2
    run = runs(
        model=MODELS[model],
        train={"lr": 2e-2, "steps": 7, "batch_size": 4, "warmup_steps": 2},
        parallel={"replicas": 1, "stages": stages},
        method=LLAMA,
    )
    target = tmp_path / "model"
    said = CliRunner().invoke(app, ["export", str(run.folder), "--to", "hf", "-o", str(target)])
    assert said.exit_code == 0, said.output
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target, local_files_only=True).eval()
    assert type(theirs).__name__ == ("Qwen2ForCausalLM" if model == "qwen2" else "LlamaForCausalLM")
    tokens = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = theirs(tokens).logits.float()
    wanted = our_logits(run, tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert wanted.std() > 0.5, "the comparison needs a model that has learnt to tell bytes apart"
    if model == "qwen2":
        biases = [t for name, t in read_weights(run.folder).items() if name.endswith("q_proj.bias")]
        assert all(bias.abs().max() > 1e-3 for bias in biases), "and biases that have moved"


def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(runs, tmp_path, monkeypatch, capsys):
    def export(*arguments):
        monkeypatch.setattr("sys.argv", ["dilocox", "export", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, capsys.readouterr().err

    status, said = export(tmp_path, "-o", tmp_path / "x")
    assert status == 2 and "weights.json: cannot be read" in said and not list(tmp_path.iterdir())
    run = runs(method=LLAMA)
    status, said = export(run.folder, "--to", "gguf")
    assert status == 2 and "--to: found 'gguf', allowed: hf" in said
    (tmp_path / "x").mkdir()
    status, said = export(run.folder, "-o", tmp_path / "x")
    assert status == 2 and "is there already" in said
    assert json.loads((run.folder / "weights" / "weights.json").read_text())["shape"]["dim"] == 32
