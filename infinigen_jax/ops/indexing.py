"""Lookup and update of array entries with one index row per sequence and KV head."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int


def look_up(table: Array, index: Int[Array, "b k n"]) -> Array:
    """Return table[i, j, index[i, j, m]]; every index must be within the table."""
    return jnp.take_along_axis(table, index, axis=2, mode="promise_in_bounds")


def put(table: Array, index: Int[Array, "b k n"], values: Array | bool) -> Array:
    """Set table[i, j, index[i, j, m]] = values[i, j, m]; indices are distinct, or beyond it."""
    return by_head(table, index).set(values, mode="drop")


def by_head(table: Array, index: Int[Array, "b kv n"]) -> Any:
    """Return `table.at` of the entries table[i, j, index[i, j, m]]; kv is 1 for equal heads."""
    batch = jnp.arange(table.shape[0], dtype=jnp.int32)[:, None, None]
    head = jnp.arange(table.shape[1], dtype=jnp.int32)[None, :, None]
    return table.at[batch, head, index]
