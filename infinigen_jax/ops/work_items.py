"""Work items: equal pieces of rows that need very different numbers of places.

Static shapes are as large as any row may need. The places needed are cut into items of CHUNK places
of one row, and a loop processes some items at a time, from all rows. (For the CPU: on a GPU a loop
of unknown length costs a round trip to the host.)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

CHUNK_BITS = 6
CHUNK = 1 << CHUNK_BITS  # places of a work item
ITEMS = 32  # most work items of a loop iteration
FEW_ITEMS = 8  # work items of an iteration with few rows


class WorkItems(NamedTuple):
    """Number of work items of each of r rows, and up to the end of each row."""

    counts: Int[Array, " r"]
    ends: Int[Array, " r"]

    @property
    def begin(self) -> Int[Array, " r"]:
        """Index of the first item of each row, or the index it would have."""
        return self.ends - self.counts

    def loops(self, at_once: int) -> Int[Array, ""]:
        """Return the number of iterations that process all items."""
        return (self.ends[-1] + (at_once - 1)) // at_once

    def places(
        self, loop: Int[Array, ""], at_once: int
    ) -> tuple[Int[Array, " p"], Int[Array, "p c"]]:
        """Return the p = `at_once` items of an iteration: their rows, and their places in the row.

        Items after the last one belong to the last row, with places beyond its request.
        """
        item = loop * at_once + jnp.arange(at_once, dtype=jnp.int32)
        row = jnp.sum(self.ends[None] <= item[:, None], axis=-1, dtype=jnp.int32)
        row = jnp.minimum(row, self.ends.shape[0] - 1)
        first = (item - self.begin[row]) * CHUNK
        return row, first[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)[None]


def cut_items(requested: Int[Array, " r"]) -> WorkItems:
    """Cut the requested number of places of each row into work items."""
    counts = (requested + (CHUNK - 1)) // CHUNK
    return WorkItems(counts, jnp.cumsum(counts))


def items_at_once(rows: int, most: int) -> int:
    """Return the number of items of a loop iteration, for rows that need about two items each."""
    return min(max(FEW_ITEMS, 2 * rows), ITEMS, rows * most)


def most_items(places: int) -> int:
    """Return the largest number of items of a row with at most `places` places."""
    return -(-places // CHUNK)
