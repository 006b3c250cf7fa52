"""Rows that want very different numbers of things, cut into jobs of equal size.

Static shapes have room for the most that any row may want. What is wanted is less: it is cut into
jobs of CHUNK places of one row, and a loop does some of them at a time, of whichever rows. (A loop
whose length is not known is a round trip to the host on a GPU: this is for a CPU.)
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

CHUNK_BITS = 6
CHUNK = 1 << CHUNK_BITS  # places of a job
JOBS = 32  # at a time


class Jobs(NamedTuple):
    """Jobs of r rows, row by row.

    Attributes:
        number: how many each row has.
        ends: how many there are to the end of each row.
    """

    number: Int[Array, " r"]
    ends: Int[Array, " r"]

    @property
    def begin(self) -> Int[Array, " r"]:
        """The first job of each row, or where it would be."""
        return self.ends - self.number

    def loops(self, at_once: int) -> Int[Array, ""]:
        """After how many loops all are done."""
        return (self.ends[-1] + (at_once - 1)) // at_once

    def places(
        self, loop: Int[Array, ""], at_once: int
    ) -> tuple[Int[Array, " p"], Int[Array, "p c"]]:
        """The p = `at_once` jobs of a loop: the row of each, and the places in it.

        Those behind the last job are of the last row, at places that it does not want.
        """
        job = loop * at_once + jnp.arange(at_once, dtype=jnp.int32)
        row = jnp.sum(self.ends[None] <= job[:, None], axis=-1, dtype=jnp.int32)
        row = jnp.minimum(row, self.ends.shape[0] - 1)
        first = (job - self.begin[row]) * CHUNK
        return row, first[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)[None]


def cut(wanted: Int[Array, " r"]) -> Jobs:
    """Jobs for so many places of each row."""
    number = (wanted + (CHUNK - 1)) // CHUNK
    return Jobs(number, jnp.cumsum(number))


def most_jobs(places: int) -> int:
    """Of a row that wants at most so many places."""
    return -(-places // CHUNK)
