"""Granite 3 and later, dense: LLaMA with constant factors on embeddings, residuals and logits."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from infinigen_jax.models import llama
from infinigen_jax.models.base import ModelConfig
from infinigen_jax.models.rope_hf import positive_number

__all__ = ["Embedding", "Layer", "config_from_hf"]

FACTORS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "query_scale",
    "logits_scaling": "logit_divisor",
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json` of model_type "granite"; refuse unsupported settings."""
    return llama.relative_from_hf(
        hf,
        "granite",
        **{ours: positive_number(hf.get(name, 1.0), name) for name, ours in FACTORS.items()},
    )


class Layer(llama.Layer):
    """See `llama.Layer`. What attention and MLP add to the residual stream is scaled."""

    def attention_output(self, o: Float[Array, "*b h d"]) -> Float[Array, "*b e"]:
        y = super().attention_output(o)
        return y * jnp.asarray(self.config.residual_scale, y.dtype)

    def mlp(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        y = super().mlp(x)
        return y * jnp.asarray(self.config.residual_scale, y.dtype)


class Embedding(llama.Embedding):
    """See `llama.Embedding`."""

    def embed(self, tokens: Int[Array, "*b"], positions: Int[Array, "*b"]) -> Float[Array, "*b e"]:
        x = super().embed(tokens, positions)
        return x * jnp.asarray(self.config.embedding_scale, x.dtype)

    def logits(self, x: Float[Array, "*b e"]) -> Float[Array, "*b v"]:
        return super().logits(x) / self.config.logit_divisor
