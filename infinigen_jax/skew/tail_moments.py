"""Covariances of keys and values within blocks of tokens, for the prediction of the tail."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

BLOCK = 64  # tokens of a block


class BlockMoments(NamedTuple):
    """Covariances of keys, and of keys (rows) with values (columns), around their block means.

    Keys are as they enter the dot product. Both arrays are [k, d, d].
    """

    key_covariance: np.ndarray
    cross_covariance: np.ndarray


def block_products(
    keys: Float[Array, "s k d"], values: Float[Array, "s k d"], counted: Bool[Array, " s"]
) -> tuple[Float[Array, "k d d"], Float[Array, "k d d"]]:
    """Return sums over a window's counted tokens; their means are `BlockMoments`."""
    blocks = -(-len(keys) // BLOCK)
    pad = ((0, blocks * BLOCK - len(keys)), (0, 0), (0, 0))
    valid = jnp.pad(counted, pad[0]).reshape(blocks, BLOCK, 1, 1).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(valid, axis=1, keepdims=True), 1)

    def centred(x: Array) -> Array:
        x = jnp.pad(x, pad).reshape(blocks, BLOCK, *x.shape[1:])
        return (x - jnp.sum(x * valid, axis=1, keepdims=True) / count) * valid

    k, v = centred(keys), centred(values)
    return jnp.einsum("mskd,mske->kde", k, k), jnp.einsum("mskd,mske->kde", k, v)
