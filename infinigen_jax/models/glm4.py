"""GLM-4-0414 and later, dense: GLM-4 with norms after attention and MLP as well."""

from collections.abc import Mapping
from typing import Any

from infinigen_jax.models import gemma2, qwen2
from infinigen_jax.models.base import ModelConfig
from infinigen_jax.models.glm import Embedding, glm_from_hf

__all__ = ["Embedding", "Layer", "config_from_hf"]


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json` of model_type "glm4"; refuse unsupported settings."""
    return glm_from_hf(hf, "glm4")


class Layer(gemma2.Layer, qwen2.Layer):
    """See `llama.Layer`: the norms of Gemma 2."""
