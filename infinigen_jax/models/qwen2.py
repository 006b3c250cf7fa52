"""Qwen 2 and 2.5, dense: LLaMA with biases on queries, keys, values; optional sliding windows."""

from typing import Any

from infinigen_jax.models.base import HFConfig, ModelConfig
from infinigen_jax.models.hf import sliding_windows
from infinigen_jax.models.llama import relative_from_hf


def config_from_hf(hf: HFConfig) -> ModelConfig:
    biases = {"attention_bias": True, "output_bias": False}
    if chunked := hf.get("dual_chunk_attention_config"):  # attention beyond it is not supported
        hf = {**hf, "max_position_embeddings": chunked["original_max_position_embeddings"]}
    return relative_from_hf(hf, **biases, **qwen_windows(hf))


def qwen_windows(hf: HFConfig) -> dict[str, Any]:
    """Return `sliding_window` and `sliding_layers` of ModelConfig from Qwen's settings."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
    first = int(hf.get("max_window_layers", 28)) if window else 0
    return sliding_windows(hf, window, first=first)
