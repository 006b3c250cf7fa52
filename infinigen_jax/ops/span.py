"""Spans: positions of a chunk's tokens in each sequence, padded to one length.

             c = 6                  the sequence's positions
start 4, count 6    a b c d e f     4 5 6 7 8 9
start 0, count 2    g h . . . .     0 1; padding is not written
start 7, count 0    . . . . . .     none
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped


class Span(NamedTuple):
    """Start (tokens before it) and token count of a chunk in each sequence, excluding padding."""

    start: Int[Array, " b"]
    count: Int[Array, " b"]

    @classmethod
    def whole(cls, batch: int, size: int) -> "Span":
        """Return the span of first chunks without padding."""
        return cls(jnp.zeros(batch, jnp.int32), jnp.full(batch, size, jnp.int32))

    @property
    def end(self) -> Int[Array, " b"]:
        """Tokens of a sequence, including the chunk."""
        return self.start + self.count

    def positions(self, size: int) -> Int[Array, "b c"]:
        """Return the positions of the chunk's tokens, including padding."""
        return self.start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]

    def holds(self, size: int) -> Bool[Array, "b c"]:
        """Return the mask of the chunk's tokens that are not padding."""
        return jnp.arange(size, dtype=jnp.int32)[None] < self.count[:, None]


def place_span(
    size: int, capacity: int, span: Span
) -> tuple[Int[Array, " b"], Int[Array, "b c"], Bool[Array, "b c"]]:
    """Return how to write a chunk of `size` tokens into `capacity` >= `size` slots.

    Return the slot from which `size` slots are replaced, within bounds; the chunk's token for each;
    and the mask of slots that receive their token (others keep their contents).
    """
    at = jnp.clip(span.start, 0, capacity - size)
    token = at[:, None] + jnp.arange(size, dtype=jnp.int32)[None] - span.start[:, None]
    inside = (token >= 0) & (token < span.count[:, None])
    return at, jnp.where(inside, token, 0), inside


def put_span(
    table: Shaped[Array, "b k *t"], new: Shaped[Array, "b k *c"], span: Span, axis: int
) -> Shaped[Array, "b k *t"]:
    """Write a chunk's tokens along an axis; in place if the table is donated."""
    size, capacity = new.shape[axis], table.shape[axis]
    at, token, inside = place_span(size, capacity, span)

    def write(sequence: Array, table: Array) -> Array:
        where, shape = [jnp.int32(0)] * table.ndim, list(table.shape)
        where[0], where[axis] = sequence, at[sequence]
        shape[0], shape[axis] = 1, size
        old = lax.dynamic_slice(table, where, shape)
        rows = jnp.take(new[sequence][None], token[sequence], axis, mode="clip")
        along = [size if i == axis else 1 for i in range(table.ndim)]
        rows = jnp.where(inside[sequence].reshape(along), rows, old)
        return lax.dynamic_update_slice(table, rows.astype(table.dtype), where)

    # Unrolled, XLA may copy the table between two sequences.
    return lax.fori_loop(jnp.int32(0), jnp.int32(table.shape[0]), write, table)
