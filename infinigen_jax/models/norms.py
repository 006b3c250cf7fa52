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


class Norm(nnx.Module):
    """Norm over the last axis, of the family's kind; result in x's dtype.

    x / sqrt(mean(x^2) + epsilon) * scale. LayerNorm subtracts the mean first, and may add a bias.
    """

    def __init__(self, size: int, config: ModelConfig, dtype: Any):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32 if config.float32_norms else dtype))
        self.centred, self.epsilon = config.layer_norms, config.norm_eps
        has_bias = config.layer_norms and config.norm_biases
        self.bias = nnx.Param(jnp.zeros(size, dtype)) if has_bias else None

    def __call__(self, x: Float[Array, "*b e"]) -> Float[Array, "*b e"]:
        y = x.astype(jnp.float32)
        if self.centred:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon)
        y = y * _over_last(self.scale[...], y)
        if self.bias is not None:
            y = y + _over_last(self.bias[...], y)
        return y.astype(x.dtype)


def _over_last(parameter: Array, x: Array) -> Array:
    return parameter.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
