"""Qwen 2 and 2.5, dense: LLaMA with biases on queries, keys, values; optional sliding windows."""

from typing import Any

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import kinds, relative_from_hf

DEFAULTS = {"sliding_window": 4096}
SETTINGS = {"attention_bias": True, "output_bias": False}


def config_from_hf(hf: HFConfig, **settings: Any) -> ModelConfig:
    if chunked := hf.get("dual_chunk_attention_config"):  # attention beyond it is not supported
        hf["max_position_embeddings"] = chunked["original_max_position_embeddings"]
    if not hf.get("use_sliding_window"):
        hf["sliding_window"] = None
    window = hf["sliding_window"]
    first = int(hf.get("max_window_layers", 28)) if window else 0
    hf["layer_types"] = kinds(hf, lambda i: window and i >= first)
    return relative_from_hf(hf, windows="listed", **settings)
