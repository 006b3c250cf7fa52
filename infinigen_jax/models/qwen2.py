"""Qwen 2 and 2.5, dense: LLaMA with biases on queries, keys, values; optional sliding windows."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from infinigen_jax.models import llama
from infinigen_jax.models.base import ModelConfig
from infinigen_jax.models.hf import sliding_windows
from infinigen_jax.models.linear import Linear
from infinigen_jax.models.llama import Embedding

__all__ = ["Embedding", "Layer", "config_from_hf", "qwen_windows"]


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json` of model_type "qwen2"; refuse unsupported settings."""
    return llama.relative_from_hf(hf, "qwen2", attention_bias=True, **qwen_windows(hf))


def qwen_windows(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return `sliding_window` and `sliding_layers` of ModelConfig from Qwen's settings."""
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window", False) else None
    return sliding_windows(hf, window, first=int(hf.get("max_window_layers", 28)))


class Layer(llama.Layer):
    """See `llama.Layer`. The output projection has no bias."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        width = config.query_width
        self.o = Linear(width, config.hidden_size, False, dtype)
