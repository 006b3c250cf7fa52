"""Where the tokens of a chunk go: a run of positions of each sequence, padded to one length.

             c = 6                  a sequence's own positions
start 4, count 6    a b c d e f     4 5 6 7 8 9
start 0, count 2    g h . . . .     0 1, and padding that is written nowhere
start 7, count 0    . . . . . .     nothing at all
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped


class Span(NamedTuple):
    """See the module's docstring.

    Attributes:
        start: tokens that a sequence has before the chunk.
        count: of the chunk's tokens, that are not padding.
    """

    start: Int[Array, " b"]
    count: Int[Array, " b"]

    @classmethod
    def first(cls, counts: Int[Array, " b"]) -> "Span":
        """Of sequences that have nothing yet."""
        return cls(jnp.zeros_like(counts), counts)

    @classmethod
    def whole(cls, batch: int, size: int) -> "Span":
        """`first`, without padding."""
        return cls.first(jnp.full(batch, size, jnp.int32))

    @property
    def end(self) -> Int[Array, " b"]:
        """Tokens of a sequence, the chunk included."""
        return self.start + self.count

    def positions(self, size: int) -> Int[Array, "b c"]:
        """Of the chunk's tokens, padding included."""
        return self.start[:, None] + jnp.arange(size, dtype=jnp.int32)[None]

    def holds(self, size: int) -> Bool[Array, "b c"]:
        """Which of the chunk's tokens are not padding."""
        return jnp.arange(size, dtype=jnp.int32)[None] < self.count[:, None]


def place_span(
    size: int, capacity: int, span: Span
) -> tuple[Int[Array, " b"], Int[Array, "b c"], Bool[Array, "b c"]]:
    """How to write a chunk of `size` into `capacity` slots, at most as many.

    Returns:
        The slot from which `size` slots are replaced, within bounds; which token of the chunk each
        of them would get; and whether it gets it, or keeps what it has.
    """
    at = jnp.clip(span.start, 0, capacity - size)
    token = at[:, None] + jnp.arange(size, dtype=jnp.int32)[None] - span.start[:, None]
    inside = (token >= 0) & (token < span.count[:, None])
    return at, jnp.where(inside, token, 0), inside


def put_span(
    table: Shaped[Array, "b k *t"], new: Shaped[Array, "b k *c"], span: Span, axis: int
) -> Shaped[Array, "b k *t"]:
    """Write a chunk's tokens, which lie along an axis; in place where the table is donated."""
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

    # A loop, or XLA may copy the table between one sequence and the next.
    return lax.fori_loop(jnp.int32(0), jnp.int32(table.shape[0]), write, table)
