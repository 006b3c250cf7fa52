"""Values of the tail, predicted from the index. Not in the paper.

Rows that are not fetched are attended as means of a block of tokens (`InfiniGen.tail_tokens`), but
values in a block correlate with the tokens' weights. Keys and values derive from the same hidden
state, so a key predicts part of its value. With z the leading columns of a token's index entry, and
v0, z0 the means of its block,

    v = v0 + (z - z0) S + rest          S = (Cov(z) + ridge)^-1 Cov(z, v)

where both covariances are taken within blocks on calibration text. A block keeps the mean of
v - z S instead of the mean of v. The weighted mean of z, a few numbers per head, restores the
difference:

    sum of w v = sum over blocks of (sum of w) (mean of v - z S) + (sum of w z) S + (sum of w rest)
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from infinigen_jax.models.base import Params

RIDGE = 1e-3  # relative to the columns' mean variance
FEW = 4  # at most this many tokens (a decode step): products are fused into their consumers


@jax.jit
def fit_slope(
    key_covariance: Float[Any, "k d d"],
    cross_covariance: Float[Any, "k d d"],
    columns: Float[Any, "k d c"],
) -> Float[Array, "k c d"]:
    """Fit S for the leading columns of the keys' change of basis; float32, enough with the ridge.

    `cross_covariance` is of keys (rows) with values (columns).
    """
    change = jnp.asarray(columns, jnp.float32)
    with jax.default_matmul_precision("highest"):
        gram = change.mT @ jnp.asarray(key_covariance, jnp.float32) @ change
        unit = jnp.eye(gram.shape[-1], dtype=gram.dtype)[None]
        cross = change.mT @ jnp.asarray(cross_covariance, jnp.float32)
        ridge = RIDGE * jnp.trace(gram, axis1=1, axis2=2) / gram.shape[-1]
        # A head with constant keys predicts nothing; the ridge only keeps the system regular.
        ridge = jnp.where(ridge > 0, ridge, 1)[:, None, None]
        return _solve(gram + ridge * unit, cross)


def _solve(matrix: Float[Array, "k c c"], right: Float[Array, "k c d"]) -> Float[Array, "k c d"]:
    """Solve systems with positive definite matrices, which elimination solves without pivots.

    JAX takes 0.2 s to initialise LAPACK.
    """
    rows = jnp.concatenate([matrix, right], axis=-1)
    for i in range(matrix.shape[-1]):
        pivot = rows[:, i] / rows[:, i, i, None]
        rows = (rows - rows[:, :, i, None] * pivot[:, None]).at[:, i].set(pivot)
    return rows[..., matrix.shape[-1] :]


def without_predicted(
    weights: Params, keys: Float[Array, "b k n d"], values: Float[Array, "b k n d"]
) -> Float[Array, "b k n d"]:
    """Return v - z S of tokens, float32, for the sums that blocks keep.

    Args:
        weights: "slope" [k, c, d]; "leading" [k, d, c], the leading columns of the keys' change of
            basis, if any; "centre" as in `query.speculation_weights`.
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
    """Return z S for weighted means of entries.

    A sum of few terms fuses into its consumer; a matrix product would add two transposed copies.
    """
    slope = weights["slope"][None, :, None]
    terms = (entry[..., c, None] * slope[..., c, :] for c in range(slope.shape[3]))
    return functools.reduce(operator.add, terms)
