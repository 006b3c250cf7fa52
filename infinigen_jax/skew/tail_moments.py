"""Covariances of keys and values within blocks of tokens, for the prediction of the tail."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

BLOCK = 64  # tokens that moments are within


class BlockMoments(NamedTuple):
    """Of keys, as they enter the dot product, and values, less the means of their blocks.

    Attributes:
        key_covariance: [k, d, d]
        cross_covariance: [k, d, d], of keys (rows) with values (columns).
    """

    key_covariance: np.ndarray
    cross_covariance: np.ndarray


def block_products(
    keys: Float[Array, "s k d"], values: Float[Array, "s k d"], counted: Bool[Array, " s"]
) -> tuple[Float[Array, "k d d"], Float[Array, "k d d"]]:
    """Sums over a window's tokens that are counted, of what `BlockMoments` has the means of."""
    blocks = -(-len(keys) // BLOCK)
    pad = ((0, blocks * BLOCK - len(keys)), (0, 0), (0, 0))
    there = jnp.pad(counted, pad[0]).reshape(blocks, BLOCK, 1, 1).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(there, axis=1, keepdims=True), 1)

    def centred(x: Array) -> Array:
        x = jnp.pad(x, pad).reshape(blocks, BLOCK, *x.shape[1:])
        return (x - jnp.sum(x * there, axis=1, keepdims=True) / count) * there

    k, v = centred(keys), centred(values)
    return jnp.einsum("mskd,mske->kde", k, k), jnp.einsum("mskd,mske->kde", k, v)
