"""Prefix cache: rows of earlier prompts in host memory, found again by their tokens.

    node [0, 512) -- node [512, 1024) -- node [1024, 1130)        one prompt
                  \\ node [512, 900)                               another one with the same start

A node of the tree holds the tokens of one chunk. A chunk ends where `Reading` cut it, and a prompt
that continues after it is read as if it had been read whole: equal states, equal programs. Answers
are not stored, because decode steps compute their rows from the rows fetched at the time.

A node keeps two kinds of arrays. Arrays with an element for each token (rows, index) are cut to the
chunk's tokens. The others (recent rows, sums, scales) are kept as they were at the chunk's end.
"""

import functools
import itertools
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.layers import Resident
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.engine.live_batch import Reading, chunk_lengths
from infinigen_jax.engine.snapshot import fill_rows, filled, kept
from infinigen_jax.prefill import compiled
from infinigen_jax.prefill.prefill import empty_cache


class Node:
    """Stored chunk.

    Attributes:
        end: number of tokens up to the chunk's end.
        rows: [l, k, n, w] rows of the host layers.
        leaves: other arrays of the cache; those by token are cut to the chunk.
        children: chunks that followed, by their tokens.
        used: time of the last use, as a count.
    """

    def __init__(self, parent: "Node | None", tokens: np.ndarray):
        self.parent, self.key, self.count = parent, tokens.tobytes(), len(tokens)
        self.end: int = self.count + (parent.end if parent is not None else 0)
        self.rows: np.ndarray | None = None
        self.leaves: list[np.ndarray] = []
        self.children: dict[bytes, Node] = {}
        self.used = 0

    @property
    def bytes(self) -> int:
        """Size of the arrays."""
        arrays = self.leaves if self.rows is None else [self.rows, *self.leaves]
        return sum(array.nbytes for array in arrays)

    def chain(self) -> list["Node"]:
        """Return the nodes from the first chunk to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixCache:
    """Rows of earlier prompts, up to a number of bytes; the least recently used are evicted."""

    def __init__(self, decoder: Decoder, capacity: int, chunk: int, limit: int):
        self.bytes = 0
        self._decoder, self._capacity, self._chunk, self._limit = decoder, capacity, chunk, limit
        self._root, self._nodes = Node(None, np.zeros(0, np.int32)), set[Node]()
        self._clock = itertools.count(1)
        make = compiled.empty.of(decoder).trace
        traced = (make(batch=1, capacity=n, slots=n) for n in (capacity, 2 * capacity))
        small, large = (each.out_info for each in traced)
        # Later tokens change observations and the sums over tokens that leave the window.
        changing = [small.states] if decoder.policy.observes else []
        changing += [each.left for each in small.local if isinstance(each, Resident)]
        changed = {id(shape) for shape in jax.tree.leaves(changing)}
        pairs = zip(*(jax.tree.leaves(kept(shapes)) for shapes in (small, large)), strict=True)
        self._axes = [
            _token_axis(one.shape, two.shape, capacity, changes=id(one) in changed)
            for one, two in pairs
        ]

    def find(self, tokens: np.ndarray) -> Node:
        """Return the last node of the longest stored beginning of a prompt, shorter than it."""
        node = self._root
        while True:
            lengths = sorted({child.count for child in node.children.values()}, reverse=True)
            keys = (
                tokens[node.end : node.end + n].tobytes()
                for n in lengths
                if node.end + n < len(tokens)
            )
            child = next((node.children[key] for key in keys if key in node.children), None)
            if child is None:
                return node
            node, node.used = child, next(self._clock)

    def restore(self, node: Node, cache: Cache) -> Cache:
        """Fill an empty cache of one sequence with the tokens up to a node; it is donated."""
        chain = node.chain()
        if not chain:
            return cache
        host = cache.host if cache.host is None else self._fill(cache.host, chain)
        parts = zip(*(node.leaves for node in chain), strict=True)
        stored = (
            np.concatenate(part if axis.by_token else part[-1:], axis=axis.number)
            for part, axis in zip(parts, self._axes, strict=True)
        )
        return filled(cache, host, stored)

    def store(self, node: Node, reading: Reading) -> Node | None:
        """Store the chunk of a reading that ends at `reading.done`; wait until it is computed.

        The chunk follows `node`. Return its node; None if it is not stored, and later ones cannot
        be either.
        """
        whole = reading.done % self._chunk == 0
        lost = node is not self._root and node not in self._nodes  # evicted in the meantime
        if lost or not (whole or self._decoder.row_format.exact):
            return None
        new = Node(node, reading.tokens[node.end : reading.done])
        if new.key in node.children:
            new = node.children[new.key]
        else:
            self._copy(new, node.end, reading.cache)
            node.children[new.key] = new
            self._nodes.add(new)
            self.bytes += new.bytes
        new.used = next(self._clock)
        self._evict()
        return new if new in self._nodes else None

    def warm_up(self, reading: Reading) -> None:
        """Run the programs for a chunk of this length, and forget the chunk."""
        limit, self._limit = self._limit, sys.maxsize
        node = self.store(self._root, reading)
        if node is not None:  # of quantised rows, only whole chunks are stored
            self.restore(node, empty_cache(self._decoder, 1, self._capacity))
        self._limit = 0
        self._evict()
        self._limit = limit

    def _copy(self, node: Node, start: int, cache: Cache) -> None:
        size = next(size for size in chunk_lengths(self._chunk) if size >= node.count)
        at = min(start, self._capacity - size)
        sliced = tuple(axis.number if axis.by_token else None for axis in self._axes)
        arrays = jax.device_get(_cut(sliced, size)(jax.tree.leaves(kept(cache)), np.int32(at)))
        for array, axis in zip(arrays, self._axes, strict=True):
            part = slice(start - at, start - at + node.count)
            if not axis.by_token:
                part = slice(-(-node.end * array.shape[axis.number] // self._capacity))
            part = slice(None) if axis.number == 0 else part
            node.leaves.append(array[(slice(None),) * axis.number + (part,)].copy())
        if cache.host is not None:
            node.rows = np.asarray(cache.host)[:, 0, :, start : node.end].copy()

    def _fill(self, host: Any, chain: list[Node]) -> Any:
        """Write the rows of a chain of nodes to the host's array of one sequence."""
        for node in chain:
            assert node.rows is not None
            start, rows = node.end - node.count, node.rows
            size = next(size for size in chunk_lengths(self._chunk) if size >= node.count)
            if start + size > self._capacity:  # one more program would only serve this case
                start = self._capacity - size
                rows = np.concatenate([n.rows for n in chain if n.rows is not None], axis=2)
                rows = rows[:, :, start : node.end]
            host = fill_rows(self._decoder, host, 0, start, rows, size)
        return host

    def _evict(self) -> None:
        while self.bytes > self._limit:
            ends = (node for node in self._nodes if not node.children)
            node = min(ends, key=lambda node: node.used)
            assert node.parent is not None
            del node.parent.children[node.key]
            self._nodes.remove(node)
            self.bytes -= node.bytes


class _Axis(NamedTuple):
    """Axis of an array that grows with the capacity; axis 0, the batch, if there is none.

    With `by_token` it has an element for each token, which later tokens do not change.
    """

    number: int
    by_token: bool


def _token_axis(
    shape: tuple[int, ...], larger: tuple[int, ...], capacity: int, *, changes: bool
) -> _Axis:
    """Return the axis of an array that grows, given the shape for a larger capacity."""
    grown = (i for i, (n, m) in enumerate(zip(shape, larger, strict=True)) if n != m)
    number = next(grown, 0)
    return _Axis(number, number > 0 and shape[number] == capacity and not changes)


@functools.lru_cache(maxsize=64)
def _cut(axes: tuple[int | None, ...], size: int) -> Any:
    """Return a compiled function that cuts `size` tokens out of the arrays by token."""

    def cut(leaves: list[Any], start: Any) -> list[Any]:
        return [
            leaf if axis is None else lax.dynamic_slice_in_dim(leaf, start, size, axis)
            for leaf, axis in zip(leaves, axes, strict=True)
        ]

    return jax.jit(cut)
