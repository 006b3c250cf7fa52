"""Arcee (AFM): LLaMA with an MLP without gate, whose activation is a squared ReLU."""

from collections.abc import Mapping
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from infinigen_jax.models import llama
from infinigen_jax.models.base import ModelConfig
from infinigen_jax.models.linear import Linear
from infinigen_jax.models.llama import Embedding

__all__ = ["Embedding", "Layer", "config_from_hf"]


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json` of model_type "arcee"; refuse unsupported settings."""
    hf = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, **hf}
    return llama.relative_from_hf(hf, "arcee")


class Layer(llama.Layer):
    """See `llama.Layer`."""

    def __init__(self, config: ModelConfig, dtype: Any, rngs: nnx.Rngs):
        super().__init__(config, dtype, rngs)
        del self.gate_up
        self.up = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias, dtype)

    def feed_forward(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        return self.down(llama.ACTIVATIONS[self.config.activation](self.up(x)))
