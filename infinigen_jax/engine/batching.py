"""Continuous batching: a waiting prompt replaces one that has ended; see `engine.batch`."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import (
    read_block,
    read_sequence,
    shared_slots,
    write_block,
)
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.layer_rows import STREAM_BLOCK

IDLE = -1


class Owners:
    """Record of which prompt occupies each sequence of a batch, kept in Python.

    Attributes:
        owner: [b] prompt of each sequence, or IDLE. Replaced, never changed in place.
        waiting: prompts that have not been admitted yet, in order.
    """

    def __init__(self, prompt_lengths: np.ndarray, batch: int):
        self._prompt_lengths = prompt_lengths
        self.owner = np.arange(batch)
        self.waiting = collections.deque(range(batch, len(prompt_lengths)))
        self._steps: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def batch(self) -> int:
        return len(self.owner)

    @property
    def idle(self) -> np.ndarray:
        """Mask of the idle sequences, [b]."""
        return self.owner == IDLE

    def record(self, owner: np.ndarray, cached: np.ndarray, steps: int = 1) -> None:
        """Record dispatched steps after `cached` tokens, [b], and the owners at that time."""
        self._steps += [(owner, cached + step) for step in range(steps)]

    def give(self, sequence: int, prompt: int) -> None:
        """Assign a sequence to a prompt, or to none: IDLE."""
        self.owner = np.where(np.arange(self.batch) == sequence, prompt, self.owner)

    def history(self, steps_of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which sequences count in each step, and the tokens cached before it, [steps, b].

        The leading `steps_of` steps of each prompt count.
        """
        if not self._steps:
            return np.zeros((0, self.batch), bool), np.zeros((0, self.batch), np.int32)
        owner, cached = (np.stack(arrays) for arrays in zip(*self._steps, strict=True))
        age = cached - self._prompt_lengths[owner]
        return (owner != IDLE) & (age < steps_of[owner]), cached


def _cache_shardings(at: Any) -> Cache:
    return Cache(at.host, at.rows, at.rows, at.batch, at.rows, at.rows, at.rows)


@compiled(lambda at: (_cache_shardings(at), at.batch), donate_argnums=0)
def insert(
    decoder: Decoder, cache: Cache, others: Any, one: Cache, new: Any, sequence: Int[Array, ""]
) -> tuple[Cache, Any]:
    """Replace a sequence, also in other arrays, by that of a cache of the same capacity.

    The cache is donated.
    """
    host = cache.host
    if host is not None:
        assert one.host is not None
        shared = shared_slots(one.host, 1)
        count = one.lengths[0] - shared
        host = copy_sequence(decoder, host, one.host, sequence, jnp.int32(shared), count)
    rest = put_sequence(cache._replace(host=None), one._replace(host=None), sequence)
    return rest._replace(host=host), put_sequence(others, new, sequence)


@compiled(lambda at: (_cache_shardings(at), at.batch), donate_argnums=0)
def extract(
    decoder: Decoder, host: Any, cache: Cache, others: Any, sequence: Int[Array, ""]
) -> tuple[Cache, Any]:
    """Copy a sequence into a cache of its own, whose `host` array is given and donated.

    All its rows are on the host and none are shared.
    """

    def read(layer: Array, start: Array, size: int) -> Array:
        assert cache.host is not None
        return read_sequence(cache.host, layer, sequence, start, size, decoder.mesh)

    if host is not None:
        host = _copy_blocks(host, jnp.int32(0), cache.lengths[sequence], read, decoder)
    rest = take_sequence(cache._replace(host=None), sequence)
    return rest._replace(host=host), take_sequence(others, sequence)


def take_sequence(batch: Any, sequence: Int[Array, ""]) -> Any:
    """Return a sequence of every array of a tree, as a batch of one."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, sequence, 1, 0), batch)


def put_sequence(batch: Any, one: Any, sequence: Int[Array, ""]) -> Any:
    """Replace a sequence in every array of a tree by the only one of another tree."""
    return jax.tree.map(
        lambda x, new: lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), sequence, 0),
        batch,
        one,
    )


def copy_sequence(
    decoder: Decoder,
    host: Shaped[Array, "l a k t w"],
    one: Shaped[Array, "l n k s w"],
    sequence: Int[Array, ""],
    start: Int[Array, ""],
    count: Int[Array, ""],
) -> Shaped[Array, "l a k t w"]:
    """Copy `count` slots of a single sequence into one of the host's array, block by block.

    One compiled program serves all lengths. Later slots are undefined afterwards.
    """

    def read(layer: Array, place: Array, size: int) -> Array:
        return read_block(one, layer, start + place, size, decoder.mesh, 1)

    return _copy_blocks(host, sequence, count, read, decoder)


def _copy_blocks(
    host: Shaped[Array, "l a k t w"],
    sequence: Int[Array, ""],
    count: Int[Array, ""],
    read: Callable[[Array, Array, int], Array],
    decoder: Decoder,
) -> Shaped[Array, "l a k t w"]:
    """Write the first `count` slots of a sequence of the host's array, or all, block by block.

    `read` maps layer, first slot and number of slots to rows [1, k, n, w].
    """
    layers, _, _, capacity, _ = host.shape
    block = min(capacity, STREAM_BLOCK)
    blocks = (jnp.minimum(count, capacity) + block - 1) // block

    def copy(i: Array, host: Array) -> Array:
        layer, place = i // blocks, jnp.minimum(i % blocks * block, capacity - block)
        # The barrier keeps the write's reshape from the copy to the device, which XLA refuses.
        rows = lax.optimization_barrier(read(layer, place, block))
        return write_block(host, layer, sequence, place, rows, decoder.mesh)

    return lax.fori_loop(jnp.int32(0), layers * blocks, copy, host)


@compiled(lambda at: at.batch)
def rest(decoder: Decoder, lengths: Int[Array, " b"], idle: Bool[Array, " b"]) -> Int[Array, " b"]:
    """Set the lengths of idle sequences to 0: they fetch nothing and never fill the cache."""
    return jnp.where(idle, 0, lengths)
