"""Attention that cached tokens receive from a chunk's queries, for policies that observe it."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from infinigen_jax.ops.attention import soft_capped
from infinigen_jax.ops.indexing import by_head
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill.prior_rows import PriorRows

QUERIES = 256  # queries per tile


def attention_mass(
    q: Float[Array, "b c h d"],
    keys: Float[Array, "b c k d"],
    log_sum: Float[Array, "b c h"],
    span: Span,
    prior: PriorRows,
    cap: float | None = None,
) -> Float[Array, "b k t"]:
    """Return the attention weight of each slot, summed over queries and query heads of a KV head.

    The chunk's queries are scaled and rotated, its keys rotated. Requires slot = position. This is
    a second pass over all keys, with the known softmax sums.
    """
    position = span.positions(q.shape[1])
    # An infinite log-sum gives padding a weight of exactly 0.
    log_sum = jnp.where(span.holds(q.shape[1])[..., None], log_sum, jnp.inf)
    queries = (q, log_sum, position)

    def visit(number: Array, total: Array) -> Array:
        block = prior.block(number)
        weights = _weights_of_keys(queries, block.keys, block.positions, cap)
        previous = lax.dynamic_slice_in_dim(total, block.at, prior.size, axis=2)
        return lax.dynamic_update_slice_in_dim(total, previous + weights, block.at, axis=2)

    b, k = q.shape[0], keys.shape[2]
    total = jnp.zeros((b, k, prior.capacity), jnp.float32)
    total = lax.fori_loop(jnp.int32(0), prior.blocks, visit, total)
    chunk_weights = _weights_of_keys(queries, keys.swapaxes(1, 2), position, cap)
    return by_head(total, position[:, None]).add(chunk_weights, mode="drop")


def _weights_of_keys(
    queries: tuple[Array, Array, Array],
    keys: Float[Array, "b k n d"],
    slots: Int[Array, "b n"],
    cap: float | None,
) -> Float[Array, "b k n"]:
    """Return the weights that keys in given slots receive from (queries, log-sums, positions)."""
    b, k, n, _ = keys.shape
    c = queries[0].shape[1]
    size = min(QUERIES, c)

    def tiles(x: Array, padding: float) -> Array:
        widths = [(0, 0), (0, -c % size)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=padding)
        return x.reshape(b, -1, size, *x.shape[2:]).swapaxes(0, 1)

    def add(total: Array, tile: tuple[Array, Array, Array]) -> tuple[Array, None]:
        q, log_sum, position = tile
        q = q.reshape(b, size, k, -1, q.shape[-1])
        log_sum = log_sum.reshape(b, size, k, -1).transpose(0, 2, 3, 1)[..., None]
        scores = jnp.einsum("bqkgd,bknd->bkgqn", q, keys, preferred_element_type=jnp.float32)
        visible = (slots[:, None] <= position[:, :, None])[:, None, None]
        weights = jnp.where(visible, jnp.exp(soft_capped(scores, cap) - log_sum), 0.0)
        return total + jnp.sum(weights, axis=(2, 3)), None

    padding = (0.0, jnp.inf, 0.0)
    q, log_sum, position = (tiles(x, p) for x, p in zip(queries, padding, strict=True))
    return lax.scan(add, jnp.zeros((b, k, n), jnp.float32), (q, log_sum, position))[0]
