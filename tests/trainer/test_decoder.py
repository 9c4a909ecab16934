"""The model: the same weights and the same function however it is cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.config import ModelConfig
from trainer.model import Shape, build_stage, canonical_name, count_parameters, stage_layers

SHAPE = Shape.of(ModelConfig(dim=32, layers=5, heads=4, kv_heads=2, ffn=48), vocab=64)


def stages(count: int, shape: Shape = SHAPE, seed: int = 0):
    return [build_stage(shape, index, count, 12, seed) for index in range(count)]


def weights(modules) -> dict[str, torch.Tensor]:
    return {canonical_name(n): p for module in modules for n, p in module.named_parameters()}


@given(layers=st.integers(1, 40), count=st.integers(1, 40))
def test_stages_are_contiguous_and_even(layers, count):
    cut = stage_layers(layers, count)
    assert [layer for part in cut for layer in part] == list(range(layers))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.parametrize("count", [2, 3, 5])
def test_initial_weights_and_outputs_do_not_depend_on_stages(count):
    whole, parts = stages(1), stages(count)
    assert weights(whole).keys() == weights(parts).keys()
    assert all(torch.equal(p, weights(whole)[name]) for name, p in weights(parts).items())
    tokens = torch.randint(0, 64, (3, 12))
    x = tokens
    for part in parts:
        x = part(x)
    assert torch.equal(x, whole[0](tokens))


def test_initial_weights_depend_on_seed_and_name():
    first, second = weights(stages(1)), weights(stages(1, seed=1))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(first[name], second[name])
    assert not torch.equal(first[name], first["model.layers.1.self_attn.q_proj.weight"])
    assert first[name].std().item() == pytest.approx(0.02, rel=0.1)


def test_attention_is_causal_and_sees_positions():
    (model,) = stages(1)
    for parameter in model.parameters():
        parameter.requires_grad_(False).mul_(20 if parameter.dim() > 1 else 1)
    tokens = torch.randint(0, 64, (1, 12))
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 64
    same = torch.isclose(model(tokens), model(changed), atol=1e-6).all(dim=-1)[0]
    assert same[:7].all() and not same[7:].any()
    swapped = tokens[:, [1, 0, *range(2, 12)]]
    assert tokens[0, 0] == tokens[0, 1] or not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1])


def test_presets_have_the_sizes_their_names_say():
    sizes = {"decoder-0.4m": 0.41e6, "decoder-1m": 1.07e6, "decoder-4m": 3.93e6}
    for preset, size in sizes.items():
        assert count_parameters(Shape.of(ModelConfig(preset=preset), 256)) == pytest.approx(size, rel=0.01)


def test_a_tied_head_is_the_embedding():
    tied = Shape.of(ModelConfig(dim=32, layers=2, heads=4, ffn=48, tied=True), vocab=64)
    assert count_parameters(tied) == sum(p.numel() for p in weights(stages(1, tied)).values())
    (model,) = stages(1, tied)
    assert model.lm_head.weight is model.embed_tokens.weight


def test_parameter_names_are_those_of_a_llama_checkpoint():
    names = set(weights(stages(1)))
    layer = {n.removeprefix("model.layers.0.") for n in names if n.startswith("model.layers.0.")}
    assert layer == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
    }
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} < names
