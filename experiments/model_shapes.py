"""Parameter shapes of models that nobody here could train, from a Hugging Face config.json; nothing is allocated."""

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.errors import RequestError

MODELS = Path(__file__).resolve().parent / "models"
Shapes = dict[str, tuple[int, ...]]


def model_names() -> list[str]:
    """Models that are named."""
    return sorted(path.stem for path in MODELS.glob("*.json"))


def load_model(name_or_path: str) -> dict[str, Any]:
    """A model's config.json, by its name here or by its path.

    Raises:
        RequestError: neither a name nor a readable config.json.
    """
    path = MODELS / f"{name_or_path}.json" if name_or_path in model_names() else Path(name_or_path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        near = difflib.get_close_matches(name_or_path, model_names(), n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise RequestError(
            f"model: found {name_or_path!r}, allowed: {', '.join(model_names())},"
            f" or the path of a Hugging Face config.json{hint}"
        ) from error
    except ValueError as error:
        raise RequestError(f"{path}: is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise RequestError(f"{path}: found {type(config).__name__}, allowed is a Hugging Face config.json")
    return config


def parameter_shapes(config: Mapping[str, Any]) -> Shapes:
    """Name -> shape of every parameter, in the order of the layers.

    Understands `model_type` llama, mistral, qwen2 (with biases on q, k and v) and opt.

    Raises:
        RequestError: another architecture, or a key that is missing.
    """
    kind = config.get("model_type")
    builders = {"llama": _llama, "mistral": _llama, "qwen2": _llama, "opt": _opt}
    if kind not in builders:
        raise RequestError(f"model_type: found {kind!r}, allowed: {', '.join(builders)}")
    try:
        return builders[kind](config)
    except KeyError as error:
        raise RequestError(f"config.json: {error.args[0]}: found nothing, allowed is a number") from error


def layers_of(shapes: Shapes) -> int:
    """How many layers the names tell."""
    return 1 + max(
        int(part) for name in shapes for part in [name.partition("layers.")[2].partition(".")[0]] if part
    )


def count(shapes: Shapes) -> int:
    """Parameters in all."""
    return sum(math.prod(shape) for shape in shapes.values())


def stage_shapes(shapes: Shapes, stages: int) -> list[Shapes]:
    """The shapes of each pipeline stage: layers split evenly, the first stages holding one more where they must.

    Embeddings lie on the first stage, the last norm and the head on the last.

    Raises:
        RequestError: more stages than layers.
    """
    layers = layers_of(shapes)
    if not 1 <= stages <= layers:
        raise RequestError(f"stages: found {stages}, allowed are 1 to {layers}, the model's layers")
    each, extra = divmod(layers, stages)
    bounds = [stage * each + min(stage, extra) for stage in range(stages + 1)]
    result: list[Shapes] = [{} for _ in range(stages)]
    seen_a_layer = False
    for name, shape in shapes.items():
        number = name.partition("layers.")[2].partition(".")[0]
        if number:
            seen_a_layer = True
            stage = next(s for s in range(stages) if int(number) < bounds[s + 1])
        else:
            stage = stages - 1 if seen_a_layer else 0
        result[stage][name] = shape
    return result


def _llama(config: Mapping[str, Any]) -> Shapes:
    dim, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    kv_dim = dim // heads * config.get("num_key_value_heads", heads)
    bias = config["model_type"] == "qwen2" or config.get("attention_bias", False)
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, dim)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (dim,)
        for name, width in (("q_proj", dim), ("k_proj", kv_dim), ("v_proj", kv_dim)):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (width, dim)
            if bias:
                shapes[f"{prefix}.self_attn.{name}.bias"] = (width,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (dim, dim)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (dim,)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (ffn, dim)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (ffn, dim)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (dim, ffn)
    shapes["model.norm.weight"] = (dim,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, dim)
    return shapes


def _opt(config: Mapping[str, Any]) -> Shapes:
    dim, ffn = config["hidden_size"], config["ffn_dim"]
    shapes: Shapes = {
        "model.decoder.embed_tokens.weight": (config["vocab_size"], dim),
        "model.decoder.embed_positions.weight": (config["max_position_embeddings"] + 2, dim),
    }

    def linear(name: str, width: int, height: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (width, height), (width,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (dim,)

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.decoder.layers.{layer}"
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            linear(f"{prefix}.self_attn.{name}", dim, dim)
        norm(f"{prefix}.self_attn_layer_norm")
        linear(f"{prefix}.fc1", ffn, dim)
        linear(f"{prefix}.fc2", dim, ffn)
        norm(f"{prefix}.final_layer_norm")
    norm("model.decoder.final_layer_norm")
    return shapes
