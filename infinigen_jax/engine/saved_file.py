"""Saved conversations: a file protected by a checksum, and the cache of one sequence as arrays.

The file is a safetensors file with the tensors

    record      all values that are not arrays, as JSON in bytes
    host.N      [k, n, w] rows of host layer N, for the n cached tokens
    leaf.N      other arrays except hot sets, in the order of the cache's tree; device layers
                without a sliding window are also cut to n tokens
    checksum    [32] SHA-256 of all bytes before it

Hot sets are excluded: they affect transfers, never results. Rows of two-byte floats that the cache
stores as integers (see `ops.bit_storage`) are floats in the file.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import Placement, write_block
from infinigen_jax.cache.layers import DenseLayer
from infinigen_jax.checkpoint.safetensors import SafetensorsFile, SafetensorsWriter
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.layer_rows import STREAM_BLOCK
from infinigen_jax.errors import InputError
from infinigen_jax.files.atomic import whole_file
from infinigen_jax.files.output import check_replaceable
from infinigen_jax.ops.bit_storage import number_dtype
from infinigen_jax.prefill.prefill import empty_cache

KIND = "infinigen-jax conversation"
VERSION = 2
BYTES = np.dtype(np.uint8)
# Errors caused by invalid values.
WRONG = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)

Layout = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


def write_saved(
    path: Path, record: dict[str, Any], layout: Layout, arrays: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Write a file completely, with one array in memory at a time, or raise an InputError."""
    check_replaceable(path)
    text = json.dumps({"kind": KIND, "version": VERSION} | record).encode()
    text += b" " * (-len(text) % 64)  # keeps the arrays aligned
    checksum = (BYTES, (hashlib.sha256().digest_size,))
    try:
        with whole_file(path) as file:
            whole = {"record": (BYTES, (len(text),)), **layout, "checksum": checksum}
            writer = SafetensorsWriter(file, whole)
            writer.add("record", np.frombuffer(text, BYTES))
            for name, array in arrays:
                writer.add(name, array)
            writer.add("checksum", np.frombuffer(writer.digest, BYTES))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; nothing was written") from None


class SavedFile:
    """A file written by `write_saved`; raises InputError if missing, damaged or another kind."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise self.refused("not a file" if path.exists() else "no such file")
        try:
            self._file = SafetensorsFile(path)
            end = self._file.tensors["checksum"].begin
            with memoryview(self._file.content) as content:
                digest = hashlib.sha256(content[:end]).digest()
            if self._file.read("checksum").tobytes() != digest:
                raise ValueError
            self.record = json.loads(self._file.read("record").tobytes())
            kind, version = self.record["kind"], self.record["version"]
            if kind != KIND:
                raise ValueError
        except WRONG:
            raise self.refused() from None
        if version != VERSION:
            raise self.refused(f"format version {version}, but version {VERSION} is needed")

    def read(self, name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Return a read-only view of an array; raise InputError if its dtype or shape differs."""
        info = self._file.tensors.get(name)
        if info is None or info.shape != shape or info.dtype != dtype:
            raise self.refused("its arrays do not fit the model and the settings")
        return self._file.read(name)

    def refused(self, why: str = "not a saved conversation, or damaged") -> InputError:
        return InputError(f"{self.path}: {why}; give a saved conversation")


def kinds(decoder: Decoder, cache: Cache, length: int) -> Layout:
    """Return the dtype and shape of each array of `arrays`, in the same order."""
    return {
        name: (number_dtype(whole.dtype, decoder.dtype), _shape(whole.shape, part))
        for name, whole, part in _parts(cache, length)
    }


def arrays(decoder: Decoder, cache: Cache, length: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of a cache of one sequence, after a flush.

    Arrays in host memory are views. Drop them before the cache is donated.
    """
    for name, whole, part in _parts(cache, length):
        yield name, np.asarray(whole).view(number_dtype(whole.dtype, decoder.dtype))[part]


def _parts(cache: Cache, length: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each array in a file, an array of the cache, and the index of its part."""
    if cache.host is not None:
        for layer in range(len(cache.host)):
            yield f"host.{layer}", cache.host, np.s_[layer, 0, :, :length]
    layers = [layer for layer in cache.local if isinstance(layer, DenseLayer)]
    by_token = {id(leaf) for leaf in jax.tree.leaves(layers)}
    for i, leaf in enumerate(jax.tree.leaves(kept(cache))):
        yield f"leaf.{i}", leaf, np.s_[:, :, :length] if id(leaf) in by_token else np.s_[...]


def _shape(shape: tuple[int, ...], part: Any) -> tuple[int, ...]:
    return np.broadcast_to(np.uint8(0), shape)[part].shape


def restore(decoder: Decoder, capacity: int, length: int, file: SavedFile) -> Cache:
    """Return the saved cache; raise InputError if it does not fit decoder and capacity."""
    cache = empty_cache(decoder, 1, capacity)
    expected = kinds(decoder, cache, length)
    saved = {name: file.read(name, *kind) for name, kind in expected.items()}
    host, block = cache.host, min(capacity, STREAM_BLOCK)  # one program serves all lengths
    for layer in range(decoder.host_layers):
        rows = saved.pop(f"host.{layer}")[None]
        for start in range(0, length, block):
            piece = rows[:, :, start : start + block]
            host = fill_rows(decoder, host, layer, start, piece, block)
    return filled(cache, host, saved.values())


def kept(cache: Cache) -> tuple[Any, ...]:
    """Return the arrays of a cache except the host's, and hot sets, which never affect results."""
    return cache.states, cache.local, cache.lengths, cache.scales


def with_kept(cache: Cache, host: Any, leaves: Iterable[Any]) -> Cache:
    """Return a cache with `host`, and with `leaves` as the arrays of `kept`."""
    structure = jax.tree.structure(kept(cache))
    states, local, lengths, scales = jax.tree.unflatten(structure, leaves)
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
    if rows.shape[2] < size:
        rows = np.pad(rows, ((0, 0), (0, 0), (0, size - rows.shape[2]), (0, 0)))
    placed = jax.device_put(rows.view(host.dtype), Placement(decoder.mesh).rows)
    return _write_rows(decoder, host, np.int32(layer), np.int32(start), placed)


@compiled(lambda at: at.host, donate_argnums=0)
def _write_rows(decoder: Decoder, host: Any, layer: Any, start: Any, rows: Any) -> Any:
    """Write rows [m, k, n, w] of m layers, from `layer`, to a cache of one sequence."""
    return write_block(host, layer, jnp.int32(0), start, rows, decoder.mesh)
