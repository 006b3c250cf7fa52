"""Values of the tail, predicted from the index. Not in the paper.

What is not fetched is attended to in means of neighbouring tokens (`InfiniGen.tail_tokens`). A mean
does not know that within a block, too, the tokens that weigh more have other values than those that
weigh less. Keys and values of a token are made of the same hidden state, so that a part of a value
can be told from its key: with z the leading columns of a token's entry in the index, and v0, z0 the
means of its block,

    v = v0 + (z - z0) S + rest          S = (Cov(z) + ridge)^-1 Cov(z, v)

both covariances within blocks, on calibration text. A block keeps the mean of v - z S instead of
that of v, and the weighted mean of z, a few numbers for a head, brings back what that lacks:

    sum of w v = sum over blocks of (sum of w) (mean of v - z S) + (sum of w z) S + (sum of w rest)
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from infinigen_jax.models.base import Params

RIDGE = 1e-3  # of the columns' mean variance
FEW = 4  # tokens, of a step: their products are parts of what uses them


@jax.jit
def fit_slope(
    key_covariance: Float[Any, "k d d"],
    cross_covariance: Float[Any, "k d d"],
    columns: Float[Any, "k d c"],
) -> Float[Array, "k c d"]:
    """S for the leading columns of an index; float32, which the ridge makes enough.

    Args:
        key_covariance: of keys, within blocks.
        cross_covariance: of keys (rows) with values (columns), likewise.
        columns: the keys' change of basis, as far as it is used.
    """
    change = jnp.asarray(columns, jnp.float32)
    with jax.default_matmul_precision("highest"):
        gram = change.mT @ jnp.asarray(key_covariance, jnp.float32) @ change
        unit = jnp.eye(gram.shape[-1], dtype=gram.dtype)[None]
        cross = change.mT @ jnp.asarray(cross_covariance, jnp.float32)
        ridge = RIDGE * jnp.trace(gram, axis1=1, axis2=2) / gram.shape[-1]
        # A head whose keys are all equal has nothing to tell its values by.
        ridge = jnp.where(ridge > 0, ridge, 1)[:, None, None]
        return jnp.linalg.solve(gram + ridge * unit, cross)


def without_predicted(
    weights: Params, keys: Float[Array, "b k n d"], values: Float[Array, "b k n d"]
) -> Float[Array, "b k n d"]:
    """v - z S of tokens, float32, for the sums that blocks keep.

    Args:
        weights: "slope" [k, c, d]; "leading" [k, d, c], the keys' change of basis as far as it is
            used, if there is one; "centre" as in `speculation.speculation_weights`.
    """
    slope = weights["slope"]
    keys, values, count = keys.astype(jnp.float32), values.astype(jnp.float32), slope.shape[1]
    few = keys.shape[2] <= FEW
    with jax.default_matmul_precision("highest"):
        if "leading" not in weights:
            entries = keys[..., :count]
        elif few:
            entries = jnp.sum(keys[..., None] * weights["leading"][None, :, None], axis=3)
        else:
            entries = jnp.einsum("bknd,kdc->bknc", keys, weights["leading"])
        if "centre" in weights:
            entries = entries - weights["centre"][None, :, None, :count]
        if few:
            return values - predicted(weights, entries)
        return values - jnp.einsum("bknc,kcd->bknd", entries, slope)


def predicted(weights: Params, entry: Float[Array, "b k g c"]) -> Float[Array, "b k g d"]:
    """z S, of weighted means of entries.

    Written out, so that it is part of what uses it and no product of its own with two transposed
    copies around it: there are few columns.
    """
    slope = weights["slope"][None, :, None]
    terms = (entry[..., c, None] * slope[..., c, :] for c in range(slope.shape[3]))
    return functools.reduce(operator.add, terms)
