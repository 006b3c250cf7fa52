"""Conversion of the cache of one sequence to arrays for a file, and back.

    host.N      [k, n, w] rows of host layer N, for the n cached tokens
    leaf.N      other arrays except hot sets, in the order of the cache's tree; device layers
                without a sliding window are also cut to n tokens

Hot sets are excluded: they affect transfers, never results. Rows of two-byte floats that the cache
stores as integers (see `ops.bit_storage`) are floats in the file.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import Placement, write_block
from infinigen_jax.cache.layers import DenseLayer
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.layer_rows import STREAM_BLOCK
from infinigen_jax.engine.saved_file import Layout, SavedFile
from infinigen_jax.ops.bit_storage import number_dtype
from infinigen_jax.prefill.prefill import empty_cache


def layout(decoder: Decoder, cache: Cache, length: int) -> Layout:
    """Return the dtype and shape of each array of `arrays`, in the same order."""
    kinds = {}
    if cache.host is not None:
        layers, _, k, _, w = cache.host.shape
        dtype = number_dtype(cache.host.dtype, decoder.dtype)
        kinds = {f"host.{n}": (dtype, (k, length, w)) for n in range(layers)}
    for i, (leaf, by_token) in enumerate(_leaves(cache)):
        shape = (*leaf.shape[:2], length, leaf.shape[3]) if by_token else leaf.shape
        kinds[f"leaf.{i}"] = (number_dtype(leaf.dtype, decoder.dtype), shape)
    return kinds


def arrays(decoder: Decoder, cache: Cache, length: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a cache of one sequence, after a flush.

    Arrays in host memory are views. Drop them before the cache is donated.
    """
    if cache.host is not None:
        rows = _numbers(decoder, cache.host)
        for layer in range(len(rows)):
            yield f"host.{layer}", rows[layer, 0, :, :length]
    for i, (leaf, by_token) in enumerate(_leaves(cache)):
        array = _numbers(decoder, leaf)
        yield f"leaf.{i}", array[:, :, :length] if by_token else array


def restore(decoder: Decoder, capacity: int, length: int, file: SavedFile) -> Cache:
    """Return the saved cache; raise InputError if it does not fit decoder and capacity."""
    cache = empty_cache(decoder, 1, capacity)
    kinds = layout(decoder, cache, length)
    saved = {name: file.read(name, *kind) for name, kind in kinds.items()}
    host, block = cache.host, min(capacity, STREAM_BLOCK)  # one program serves all lengths
    for layer in range(decoder.host_layers):
        rows = saved.pop(f"host.{layer}")[None]
        for start in range(0, length, block):
            piece = rows[:, :, start : start + block]
            host = fill_rows(decoder, host, layer, start, piece, block)
    return filled(cache, host, saved.values())


def _numbers(decoder: Decoder, array: Any) -> np.ndarray:
    array = np.asarray(array)
    return array.view(number_dtype(array.dtype, decoder.dtype))


def kept(cache: Cache) -> tuple[Any, ...]:
    """Return the arrays of a cache except the host's, and hot sets, which never affect results."""
    return cache.states, cache.local, cache.lengths, cache.scales


def _leaves(cache: Cache) -> list[tuple[Any, bool]]:
    """Return the arrays except the host's, each with whether its axis 2 counts tokens."""
    layers = [layer for layer in cache.local if isinstance(layer, DenseLayer)]
    by_token = {id(leaf) for leaf in jax.tree.leaves(layers)}
    return [(leaf, id(leaf) in by_token) for leaf in jax.tree.leaves(kept(cache))]


def with_kept(cache: Cache, host: Any, leaves: Iterable[Any]) -> Cache:
    """Return a cache with `host`, and with `leaves` as the arrays of `kept`."""
    parts = jax.tree.unflatten(jax.tree.structure(kept(cache)), leaves)
    states, local, lengths, scales = parts
    return cache._replace(host=host, states=states, local=local, lengths=lengths, scales=scales)


def filled(cache: Cache, host: Any, stored: Iterable[np.ndarray | None]) -> Cache:
    """Return an empty cache with `host`, whose arrays of `kept` begin with the stored ones.

    Arrays that are None stay empty.
    """
    leaves = jax.tree.leaves(kept(cache))
    for i, (leaf, array) in enumerate(zip(leaves, stored, strict=True)):
        if array is not None:
            whole = given = array.view(leaf.dtype)
            if given.shape != leaf.shape:  # not all arrays are 0 where they are empty
                whole = np.array(leaf)
                whole[tuple(map(slice, given.shape))] = given
            leaves[i] = jax.device_put(whole, leaf.sharding, may_alias=False)  # it will be donated
    return with_kept(cache, host, leaves)


def fill_rows(
    decoder: Decoder, host: Any, layer: int, start: int, rows: np.ndarray, size: int
) -> Any:
    """Write rows [m, k, n, w] of m layers, from `layer`, padded to `size` slots from `start`."""
    at = Placement(decoder.mesh)
    if rows.shape[2] < size:
        rows = np.pad(rows, ((0, 0), (0, 0), (0, size - rows.shape[2]), (0, 0)))
    numbers = (jax.device_put(np.int32(i), at.whole) for i in (layer, start))
    return write_rows(decoder, host, *numbers, jax.device_put(rows.view(host.dtype), at.rows))


@compiled(lambda at: at.host, donate_argnums=0)
def write_rows(decoder: Decoder, host: Any, layer: Any, start: Any, rows: Any) -> Any:
    """Write rows [m, k, n, w] of m layers, from `layer`, to a cache of one sequence."""
    return write_block(host, layer, jnp.int32(0), start, rows, decoder.mesh)
