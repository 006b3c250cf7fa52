"""Export of a trained model to a Hugging Face folder: config.json, tokenizer, safetensors."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from infinigen_jax.checkpoint.safetensors import DTYPES, SafetensorsWriter
from infinigen_jax.checkpoint.tensor_names import expected, write_tree
from infinigen_jax.files.atomic import staged, write_text
from infinigen_jax.models import Params, blueprint, config_from_hf

STORED = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"]}


def export(folder: Path, hf: dict[str, Any], params: Params, tokenizer_json: str) -> None:
    """Write the folder, whole or not at all; replace an earlier export.

    Args:
        hf: config.json; its "dtype" is the dtype of the weights.
        params: float32.
    """
    dtype = STORED[hf["dtype"]]
    tensors = named_tensors(hf, params, dtype)
    layout = {name: (dtype, tensor.shape) for name, tensor in tensors.items()}
    with staged(folder.resolve()) as out:
        with SafetensorsWriter(out / "model.safetensors", layout, {"format": "pt"}) as writer:
            for name, tensor in tensors.items():
                writer.add(name, tensor)
            writer.close()
        write_text(out / "config.json", json.dumps(hf, indent=2) + "\n")
        write_text(out / "tokenizer.json", tokenizer_json)
        write_text(
            out / "tokenizer_config.json", json.dumps(_tokenizer_config(hf), indent=2) + "\n"
        )


def named_tensors(hf: dict[str, Any], params: Params, dtype: Any) -> dict[str, np.ndarray]:
    """Return all tensors under Hugging Face's names."""
    slots = expected(blueprint(config_from_hf(hf), np.dtype(np.float32)))
    named = dict(write_tree(slots.embedding, params["embedding"]))
    for layer, layer_params in zip(slots.layers, params["layers"], strict=True):
        named.update(write_tree(layer, layer_params))
    return {name: tensor.astype(dtype) for name, tensor in named.items()}


def _tokenizer_config(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": hf["max_position_embeddings"],
    }
