"""Lookup and update of array entries with one index row per sequence and KV head."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def look_up(table: Array, index: Int[Array, "b k n"]) -> Array:
    """Return table[i, j, index[i, j, m]]; every index must be within the table."""
    return jnp.take_along_axis(table, index, axis=2, mode="promise_in_bounds")


def put(table: Array, index: Int[Array, "b k n"], values: Array | bool) -> Array:
    """Set table[i, j, index[i, j, m]] = values[i, j, m], in place if donated.

    Indices beyond the table are ignored; the others are distinct.
    """
    batch = lax.broadcasted_iota(jnp.int32, index.shape, 0)
    head = lax.broadcasted_iota(jnp.int32, index.shape, 1)
    return table.at[batch, head, index].set(values, mode="drop")
