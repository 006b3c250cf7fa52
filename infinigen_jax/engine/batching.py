"""Continuous batches: more prompts than the batch has rows, one admitted when another ends.

    row    0        1        2          a row of the batch, and of every array of the cache
    owner  prompt 0 prompt 4 -          -: idle, its length set to 0, so that nothing is fetched

A prompt is processed by itself, in a cache of one sequence, which then replaces all that a row of
the batch had: shapes stay, and so do the compiled programs. The rows of a batch are at different
lengths then, and that changes nothing: a flush writes the last `window` rows of each sequence, and
comes every `window` steps, so that no row leaves the ring before the host has it, whenever its
sequence began.
"""

import collections
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from infinigen_jax.cache.host_array import Placement, read_block, shared_slots, write_block
from infinigen_jax.cache.layers import Cache
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.sparse_attention import STREAM_BLOCK

IDLE = -1


class Owners:
    """Whose each row of the batch is, and how many tokens it has cached, as Python knows it.

    Attributes:
        owner: [b] prompt of each row, or IDLE; replaced, never changed in place.
        cached: [b] tokens in the cache, with all steps that were dispatched.
        waiting: prompts that no row had yet, in order.
    """

    def __init__(self, prompt_lengths: np.ndarray, rows: int):
        self._prompt_lengths = prompt_lengths
        self.owner = np.arange(rows)
        self.cached = prompt_lengths[:rows].copy()
        self.waiting = collections.deque(range(rows, len(prompt_lengths)))
        self._steps: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def rows(self) -> int:
        return len(self.owner)

    @property
    def idle(self) -> np.ndarray:
        """[b] rows that belong to nobody."""
        return self.owner == IDLE

    def step(self) -> None:
        """One decode step was dispatched."""
        self._steps.append((self.owner, self.cached.copy()))
        self.cached += 1

    def leave(self, row: int) -> None:
        """The row's prompt has ended."""
        self.owner = np.where(np.arange(self.rows) == row, IDLE, self.owner)

    def give(self, row: int, prompt: int) -> None:
        """The row belongs to this prompt, which is cached in it."""
        self.owner = np.where(np.arange(self.rows) == row, prompt, self.owner)
        self.cached[row] = self._prompt_lengths[prompt]

    def rest(self) -> None:
        """The idle rows' lengths were set to 0."""
        self.cached[self.idle] = 0

    def history(self, steps_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of all steps so far, [steps, b]: which count, and how many tokens were cached before.

        Args:
            steps_of: [p] how many steps of each prompt count, its first ones.
        """
        if not self._steps:
            return np.zeros((0, self.rows), bool), np.zeros((0, self.rows), np.int32)
        owner, cached = (np.stack(arrays) for arrays in zip(*self._steps, strict=True))
        age = cached - self._prompt_lengths[owner]
        return (owner != IDLE) & (age < steps_of[owner]), cached


class Admission(NamedTuple):
    """The compiled functions; see `insert` and `rest`. The batch's cache is donated."""

    insert: Any
    rest: Any


@functools.lru_cache(maxsize=64)
def admission(decoder: Decoder) -> Admission:
    """Jit a decoder's functions."""

    def replace(
        cache: Cache,
        drawn: Int[Array, " b"],
        step: Int[Array, " b"],
        one: Cache,
        first: Int[Array, " 1"],
        row: Int[Array, ""],
    ) -> tuple:
        again = jnp.ones((1,), jnp.int32)
        return insert(decoder, cache, one, row), *put_rows((drawn, step), (first, again), row)

    at: Any = Placement(decoder.mesh)
    cache = Cache(at.host, at.rows, at.rows, at.batch, at.rows, at.rows, at.rows)
    return Admission(
        insert=jax.jit(replace, donate_argnums=0, out_shardings=(cache, at.batch, at.batch)),
        rest=jax.jit(rest, out_shardings=at.batch),
    )


def insert(decoder: Decoder, cache: Cache, one: Cache, row: Int[Array, ""]) -> Cache:
    """Replace a row of a batch's cache, in place where it is donated.

    Args:
        one: the cache of one sequence, of the same capacity.
    """
    host = cache.host
    if host is not None:
        assert one.host is not None
        shared = shared_slots(one.host, 1)
        own = one.lengths[0] - shared
        host = copy_rows(host, one.host, row, jnp.int32(shared), own, decoder)
    others = put_rows(cache._replace(host=None), one._replace(host=None), row)
    return others._replace(host=host)


def put_rows(batch: Any, one: Any, row: Int[Array, ""]) -> Any:
    """Row `row` of every array of a tree is that of a tree of batch 1."""
    return jax.tree.map(
        lambda x, new: lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), row, 0), batch, one
    )


def copy_rows(
    host: Shaped[Array, "l a k t w"],
    one: Shaped[Array, "l n k s w"],
    row: Int[Array, ""],
    start: Int[Array, ""],
    count: Int[Array, ""],
    decoder: Decoder,
) -> Shaped[Array, "l a k t w"]:
    """Fill a row of the host's array with slots of another array's one sequence, block by block.

    One program for all lengths, and one block of device memory.

    Args:
        start: slot of the sequence that the row begins with.
        count: how many; what is behind them is arbitrary then.
    """
    layers, _, _, capacity, _ = host.shape
    block = min(capacity, STREAM_BLOCK)
    blocks = (count + block - 1) // block

    def copy(i: Array, host: Array) -> Array:
        layer, place = i // blocks, jnp.minimum(i % blocks * block, capacity - block)
        rows = read_block(one, layer, start + place, block, decoder.mesh, 1)
        return write_block(host, layer, row, place, rows, decoder.mesh)

    return lax.fori_loop(jnp.int32(0), layers * blocks, copy, host)


def rest(lengths: Int[Array, " b"], idle: Bool[Array, " b"]) -> Int[Array, " b"]:
    """Set idle rows back: they fetch nothing, and never come to the end of the cache."""
    return jnp.where(idle, 0, lengths)
