"""A run's final weights as a Hugging Face model: `config.json` and one file of safetensors.

The parameters already carry a Llama checkpoint's names, so exporting is renaming nothing: Llama's layout where
the projections have no bias, Qwen2's where query, key and value have one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from trainer.model import NORM_EPS, ROPE_BASE
from trainer.tensor_file import TensorFileError, write_tensors
from trainer.weights import FOLDER, INDEX, read_weights


def export_to_hf(run: Path, target: Path) -> dict[str, Any]:
    """Write `target`/config.json and `target`/model.safetensors; returns the configuration.

    Token ids are bytes, so there is no tokenizer to write.

    Raises:
        TensorFileError: the run has no final weights, or they are damaged.
        FileExistsError: `target` is there already.
        OSError: it cannot be written; nothing half-made stays.
    """
    index_file = run / FOLDER / INDEX
    try:
        index = json.loads(index_file.read_text(encoding="utf-8"))
        shape, seq_len = dict(index["shape"]), int(index["seq_len"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TensorFileError(
            f"{index_file}: cannot be read ({error}), allowed is the folder of a run that has ended"
        ) from error
    weights = read_weights(run)
    config = hf_config(shape, seq_len)
    if shape["tied"]:
        weights.pop("lm_head.weight", None)
    half_made = target.with_name(target.name + ".part")
    shutil.rmtree(half_made, ignore_errors=True)
    if target.exists():
        raise FileExistsError(f"{target} is there already")
    half_made.mkdir(parents=True)
    try:
        write_tensors(half_made / "model.safetensors", weights, {"format": "pt"})
        (half_made / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        half_made.rename(target)
    except OSError:
        shutil.rmtree(half_made, ignore_errors=True)
        raise
    return config


def hf_config(shape: dict[str, Any], seq_len: int) -> dict[str, Any]:
    """What `transformers` needs to know; `shape` holds the fields of `trainer.model.Shape`."""
    family = ("qwen2", "Qwen2ForCausalLM") if shape["qkv_bias"] else ("llama", "LlamaForCausalLM")
    return {
        "model_type": family[0],
        "architectures": [family[1]],
        "vocab_size": shape["vocab"],
        "hidden_size": shape["dim"],
        "intermediate_size": shape["ffn"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["dim"] // shape["heads"],
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},  # where transformers 5 looks
        "tie_word_embeddings": shape["tied"],
        "attention_bias": False,  # Llama's word for biases on all four projections
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": 0,  # the byte that ends a document
        "pad_token_id": None,
        "torch_dtype": "float32",
    }
