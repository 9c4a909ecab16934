"""Shapes of large models add up to the sizes that their makers state, and equal the trainer's own where it has them."""

import json
import math

import pytest

from experiments.errors import RequestError
from experiments.model_shapes import count, layers_of, load_model, parameter_shapes, stage_shapes
from trainer.model import DecoderStage, Shape, canonical_name


def test_opt_has_1316_million_parameters():
    assert count(parameter_shapes(load_model("opt-1.3b"))) == 1_315_758_080


def test_the_107b_model_has_108_billion_and_1359_million_a_layer():
    shapes = parameter_shapes(load_model("qwen1.5-107b"))
    layer = sum(math.prod(shape) for name, shape in shapes.items() if ".layers.5." in name)
    assert layer == pytest.approx(1.359e9, rel=1e-3)
    assert count(shapes) == pytest.approx(108.5e9, rel=1e-3)
    assert layers_of(shapes) == 78


def test_a_llama_config_gives_the_shapes_that_the_trainers_model_has(tmp_path):
    config = {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = DecoderStage(Shape(256, 48, 3, 4, 2, 96, tied=False), range(3), seq_len=4)
    expected = {canonical_name(name): tuple(p.shape) for name, p in ours.named_parameters()}
    assert parameter_shapes(load_model(str(tmp_path / "config.json"))) == expected


@pytest.mark.parametrize("stages", [1, 5, 24])
def test_stages_hold_every_parameter_once_and_layers_evenly(stages):
    shapes = parameter_shapes(load_model("opt-1.3b"))
    split = stage_shapes(shapes, stages)
    assert sum(map(count, split)) == count(shapes) and len(split) == stages
    assert [name for stage in split for name in stage] == list(shapes)
    held = [len({n.split(".")[3] for n in stage if ".layers." in n}) for stage in split]
    assert max(held) - min(held) <= 1
    assert "model.decoder.embed_tokens.weight" in split[0]
    assert "model.decoder.final_layer_norm.weight" in split[-1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("opt-1.3", "did you mean 'opt-1.3b'?"),
        ("nowhere/config.json", "or the path of a Hugging Face config.json"),
    ],
)
def test_an_unknown_model_is_refused_with_the_names_there_are(name, said):
    with pytest.raises(RequestError) as refused:
        load_model(name)
    assert said in str(refused.value)


def test_an_unknown_architecture_and_a_missing_key_are_named():
    with pytest.raises(RequestError, match="model_type: found 'bert', allowed: llama"):
        parameter_shapes({"model_type": "bert"})
    with pytest.raises(RequestError, match="intermediate_size: found nothing"):
        parameter_shapes({"model_type": "llama", "hidden_size": 4})


def test_more_stages_than_layers_are_refused():
    with pytest.raises(RequestError, match="stages: found 25, allowed are 1 to 24"):
        stage_shapes(parameter_shapes(load_model("opt-1.3b")), 25)
