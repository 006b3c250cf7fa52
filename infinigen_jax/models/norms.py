"""RMSNorm and LayerNorm, computed in float32 for every dtype of the activations.

Flax's norms have two drawbacks here: their default variance E[x^2] - mean^2 cancels on OPT's
outliers, and in half precision they rely on implicit promotion, which the tests forbid.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from infinigen_jax.models.base import ModelConfig


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale, over the last axis; result in x's dtype."""

    def __init__(self, size: int, config: ModelConfig, dtype: Any):
        self.scale = _scale(size, config, dtype)
        self.epsilon = config.norm_eps

    def __call__(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        return (y * _over_last(self.scale[...], y)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale, with or without + bias, over the last axis."""

    def __init__(self, size: int, config: ModelConfig, dtype: Any):
        self.scale = _scale(size, config, dtype)
        self.bias = nnx.Param(jnp.zeros(size, dtype)) if config.norm_biases else None
        self.epsilon = config.norm_eps

    def __call__(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        y = y * _over_last(self.scale[...], y)
        if self.bias is not None:
            y = y + _over_last(self.bias[...], y)
        return y.astype(x.dtype)


def norm_of(size: int, config: ModelConfig, dtype: Any) -> RMSNorm | LayerNorm:
    """Return a norm of the family's kind."""
    return (LayerNorm if config.layer_norms else RMSNorm)(size, config, dtype)


def _scale(size: int, config: ModelConfig, dtype: Any) -> nnx.Param:
    return nnx.Param(jnp.ones(size, jnp.float32 if config.float32_norms else dtype))


def _over_last(parameter: Array, x: Array) -> Array:
    return parameter.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
