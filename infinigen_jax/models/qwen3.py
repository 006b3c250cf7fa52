"""Qwen 3, dense: LLaMA with a norm on each head's query and key, before the rotation."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from infinigen_jax.models import llama
from infinigen_jax.models.base import ModelConfig
from infinigen_jax.models.llama import Embedding
from infinigen_jax.models.norms import RMSNorm
from infinigen_jax.models.qwen2 import qwen_windows

__all__ = ["Embedding", "Layer", "config_from_hf"]


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json` of model_type "qwen3"; refuse unsupported settings."""
    hf = {"head_dim": 128, **hf}
    return llama.relative_from_hf(hf, "qwen3", **qwen_windows(hf))


class Layer(llama.Layer):
    """See `llama.Layer`. The norms apply to each head, with one scale for all heads."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        self.q_norm = RMSNorm(config.head_dim, config, dtype)
        self.k_norm = RMSNorm(config.head_dim, config, dtype)
