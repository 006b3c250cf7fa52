"""A trained model as a Hugging Face folder: config.json, tokenizer, safetensors in shards."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from infinigen_jax.atomic import staged, write_text
from infinigen_jax.convert.mapping import expected, write_tree
from infinigen_jax.models import Params, blueprint, config_from_hf
from infinigen_jax.safetensors_io import DTYPES, SafetensorsWriter

SHARD_BYTES = 16_000_000  # below 16 MiB, header included
STORED = {"float32": DTYPES["F32"], "bfloat16": DTYPES["BF16"]}


def export(
    folder: Path,
    hf: dict[str, Any],
    params: Params,
    tokenizer_json: str,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the folder, whole or not at all; an earlier export there is replaced.

    Args:
        hf: config.json; its "dtype" is that of the weights.
        params: float32.
        shard_bytes: most bytes of tensors in a file.
    """
    dtype = STORED[hf["dtype"]]
    tensors = named_tensors(hf, params, dtype)
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
    files = _file_names(len(shards))
    with staged(folder.resolve()) as out:
        for file, names in zip(files, shards, strict=True):
            layout = {name: (dtype, tensors[name].shape) for name in names}
            with SafetensorsWriter(out / file, layout, {"format": "pt"}) as writer:
                for name in names:
                    writer.add(name, tensors[name])
                writer.close()
        if len(files) > 1:
            places = {name: f for f, names in zip(files, shards, strict=True) for name in names}
            total = sum(tensor.nbytes for tensor in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": places}
            write_text(out / "model.safetensors.index.json", json.dumps(index, indent=1) + "\n")
        write_text(out / "config.json", json.dumps(hf, indent=2) + "\n")
        write_text(out / "tokenizer.json", tokenizer_json)
        write_text(
            out / "tokenizer_config.json", json.dumps(_tokenizer_config(hf), indent=2) + "\n"
        )


def named_tensors(hf: dict[str, Any], params: Params, dtype: Any) -> dict[str, np.ndarray]:
    """All tensors under Hugging Face's names."""
    slots = expected(blueprint(config_from_hf(hf), np.dtype(np.float32)))
    named = dict(write_tree(slots.embedding, params["embedding"]))
    for layer, layer_params in zip(slots.layers, params["layers"], strict=True):
        named.update(write_tree(layer, layer_params))
    return {name: tensor.astype(dtype) for name, tensor in named.items()}


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def _tokenizer_config(hf: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": hf["max_position_embeddings"],
    }
