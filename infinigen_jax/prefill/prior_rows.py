"""Rows before a chunk of a prompt, read in blocks, and the result of attention to them."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 1024  # tokens in a block of prior rows
NOWHERE = 2**30  # position of invalid rows, larger than that of any token

Rows = tuple[Float[Array, "b k n d"], Float[Array, "b k n d"]]  # keys and values of some slots


class PriorRows(NamedTuple):
    """Rows before a chunk, read in blocks of `size`."""

    read: Callable[[Int[Array, ""], int], Rows]  # maps (slot, n) to n rows from that slot on
    size: int
    capacity: int
    start: Int[Array, " b"]  # number of valid positions: those before the chunk
    positions: Int[Array, "b t"] | None = None  # of the slots, -1 if empty; None: slot = position
    first: int = 0  # first valid slot, where the first block begins
    side_by_side: bool = False  # whether keys and values are read as halves of one array

    @property
    def blocks(self) -> Int[Array, ""]:
        """Number of blocks with valid rows."""
        return (self._rows(jnp.max(self.start)) + self.size - 1) // self.size

    @property
    def whole_blocks(self) -> Int[Array, ""]:
        """Number of leading blocks whose rows are valid in all sequences."""
        if self.positions is not None:
            return jnp.int32(0)
        return self._rows(jnp.min(self.start)) // self.size

    def rows(self, number: Int[Array, ""]) -> Rows:
        """Read a block as it is stored."""
        return self.read(self._at(number), self.size)

    def block(self, number: Int[Array, ""]) -> "Block":
        """Read a block, with the positions of its rows."""
        return self.placed(number, self.rows(number))

    def placed(self, number: Int[Array, ""], rows: Rows) -> "Block":
        """Return a block's rows with their positions; the last block starts early to fit."""
        at = self._at(number)
        slot = at + jnp.arange(self.size, dtype=jnp.int32)[None]
        position = slot
        if self.positions is not None:
            position = lax.dynamic_slice_in_dim(self.positions, at, self.size, axis=1)
        valid = (
            (slot >= self.first + number * self.size)
            & (position >= 0)
            & (position < self.start[:, None])
        )
        # Unwritten slots may hold NaN, which a weight of 0 does not mask.
        keys, values = rows
        values = jnp.where(valid[:, None, :, None], values, 0)
        return Block(keys, values, jnp.where(valid, position, NOWHERE), at)

    def _at(self, number: Int[Array, ""]) -> Int[Array, ""]:
        return jnp.minimum(self.first + number * self.size, self.capacity - self.size)

    def _rows(self, start: Int[Array, ""]) -> Int[Array, ""]:
        return jnp.maximum(jnp.minimum(start, self.capacity) - self.first, 0)


class Block(NamedTuple):
    """Rows before a chunk in the slots from `at` on; invalid rows have position NOWHERE."""

    keys: Float[Array, "b k n d"]
    values: Float[Array, "b k n d"]
    positions: Int[Array, "b n"]
    at: Int[Array, ""]


class ChunkAttention(NamedTuple):
    """Attention of a chunk's queries, and the log-sum-exp of their scores in float32."""

    output: Float[Array, "b c h d"]
    log_sum: Float[Array, "b c h"]
