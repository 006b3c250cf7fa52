"""The rows before a chunk of a prompt, read in blocks, and what attention to them gives."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 1024  # earlier rows in a block
NOWHERE = 2**30  # a position that no token comes to


class Earlier(NamedTuple):
    """The rows before a chunk, read in blocks.

    Attributes:
        read: gives keys and values [b, k, n, d] of the n rows from some slot on.
        size: of a block.
        capacity: slots that there are, at least `size`.
        start: positions that count, those before it.
        positions: of the slots, -1 for one without a row; slot and position are the same where
            this is None.
    """

    read: Callable[[Int[Array, ""], int], tuple[Array, Array]]
    size: int
    capacity: int
    start: Int[Array, " b"]
    positions: Int[Array, "b t"] | None = None

    @property
    def blocks(self) -> Int[Array, ""]:
        return (jnp.minimum(jnp.max(self.start), self.capacity) + self.size - 1) // self.size

    @property
    def whole_blocks(self) -> Int[Array, ""]:
        """How many blocks, the first ones, are full of rows that count in every sequence."""
        if self.positions is not None:
            return jnp.int32(0)
        return jnp.minimum(jnp.min(self.start), self.capacity) // self.size

    def rows(self, number: Int[Array, ""]) -> "Rows":
        """A block as it is stored."""
        return Rows(*self.read(self._at(number), self.size))

    def block(self, number: Int[Array, ""]) -> "Block":
        return self.placed(number, self.rows(number))

    def placed(self, number: Int[Array, ""], rows: "Rows") -> "Block":
        """A block's rows with their places; the last one reaches back to fit in."""
        at = self._at(number)
        slot = at + jnp.arange(self.size, dtype=jnp.int32)[None]
        position = slot
        if self.positions is not None:
            position = lax.dynamic_slice_in_dim(self.positions, at, self.size, axis=1)
        valid = (slot >= number * self.size) & (position >= 0) & (position < self.start[:, None])
        # Slots that were never written may hold NaN, which a weight of 0 does not silence.
        values = jnp.where(valid[:, None, :, None], rows.values, 0)
        return Block(rows.keys, values, jnp.where(valid, position, NOWHERE), at)

    def _at(self, number: Int[Array, ""]) -> Int[Array, ""]:
        return jnp.minimum(number * self.size, self.capacity - self.size)


class Rows(NamedTuple):
    """Keys and values of some slots."""

    keys: Float[Array, "b k n d"]
    values: Float[Array, "b k n d"]


class Block(NamedTuple):
    """Rows before a chunk, in the slots from `at` on; the position is NOWHERE of what is none."""

    keys: Float[Array, "b k n d"]
    values: Float[Array, "b k n d"]
    positions: Int[Array, "b n"]
    at: Int[Array, ""]


class Attended(NamedTuple):
    """What a chunk's queries attended to.

    Attributes:
        output: of the attention.
        log_sum: natural logarithm of each query's summed exponentials, float32.
    """

    output: Float[Array, "b c h d"]
    log_sum: Float[Array, "b c h"]
