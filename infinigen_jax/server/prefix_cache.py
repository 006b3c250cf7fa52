"""Prefix cache: rows of earlier prompts in host memory, found again by their tokens.

    node [0, 512) -- node [512, 1024) -- node [1024, 1130)        one prompt
                  \\ node [512, 900)                               another one with the same start

A node holds one chunk, which ends where `Reading` cut it: a prompt that continues after it is read
as if it had been read whole. Of arrays with an element for each token (rows, index) or block (sums
of a tail), a node keeps the elements that the chunk may change; the others (such as scales) are
kept as they were at the chunk's end. Sinks and recent rows are found among the rows, unless these
are quantised. The time to copy a chunk does not depend on the capacity.
Answers are not stored, because decode steps compute their rows from the rows fetched at the time.
"""

import itertools
import sys
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.layers import Resident
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.engine.live_batch import Reading, chunk_lengths
from infinigen_jax.engine.saved_file import fill_rows, filled, kept, with_kept
from infinigen_jax.prefill import compiled as prefill
from infinigen_jax.prefill.prefill import empty_cache


class Node:
    """Stored chunk of tokens."""

    def __init__(self, parent: "Node | None", tokens: np.ndarray):
        self.parent, self.key, self.count = parent, tokens.tobytes(), len(tokens)
        self.start: int = 0 if parent is None else parent.end  # number of tokens before the chunk
        self.end = self.start + self.count
        # Arrays of the cache, the part that the chunk may change, or empty ones for arrays copied
        # from the rows; last, if there are host layers, their rows [l, k, n, w].
        self.arrays: list[np.ndarray] = []
        self.children: dict[bytes, Node] = {}  # chunks that followed, by their tokens
        self.used = 0  # time of the last use, as a count

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

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
        make = prefill.empty.of(decoder).trace
        traced = (make(batch=1, capacity=n, slots=n) for n in (capacity, 2 * capacity))
        small, large = (each.out_info for each in traced)
        resident = [each for each in small.local if isinstance(each, Resident)]
        sums = [each.left for each in resident]
        # States may change as a whole, or consist of other numbers than 0 where they are empty.
        empty = jax.tree.leaves(decoder.policy.init(decoder.config, 1, capacity))
        changes = decoder.policy.observes or any(np.any(x) for x in empty)
        changing = small.states if changes else ()
        by_block, whole = ({id(x) for x in jax.tree.leaves(tree)} for tree in (sums, changing))
        slots = decoder.slots

        def axis(leaf: Any, larger: Any) -> _Axis:
            grows = (i for i, n in enumerate(leaf.shape) if n != larger.shape[i])
            number = next(grows, 0)
            length, tokens, late = leaf.shape[number], 0, 0
            if number and id(leaf) in by_block:  # tokens that leave the window are added
                tokens, late = slots.tail_block, slots.window
            elif number and id(leaf) not in whole:
                tokens = int(length == capacity)
            return _Axis(number, length, capacity, tokens, late)

        shapes = [jax.tree.leaves(kept(cache)) for cache in (small, large)]
        self._axes = [axis(*pair) for pair in zip(*shapes, strict=True)]
        # For each array that the rows contain, its host layer, and 0 for keys or 1 for values.
        found = enumerate(resident if decoder.row_format.exact else ())
        in_rows = {id(x): (i, half) for i, each in found for half, x in enumerate(each[:2])}
        self._in_rows = [in_rows.get(id(leaf)) for leaf in shapes[0]]
        self._rows = _Axis(2, capacity, capacity, 1)

    def find(self, tokens: np.ndarray) -> Node:
        """Return the last node of the longest stored beginning of a prompt, shorter than it."""
        node = self._root
        while True:
            end = node.end
            lengths = sorted({child.count for child in node.children.values()}, reverse=True)
            keys = (tokens[end : end + n].tobytes() for n in lengths if end + n < len(tokens))
            child = next((node.children[key] for key in keys if key in node.children), None)
            if child is None:
                return node
            node, node.used = child, next(self._clock)

    def restore(self, node: Node, cache: Cache) -> Cache:
        """Fill an empty cache of one sequence with the tokens up to a node; it is donated."""
        cache = self.begin(node, cache)
        for each in node.chain():
            cache = self.fill(each, cache)
        return cache

    def begin(self, node: Node, cache: Cache) -> Cache:
        """Fill an empty cache with what does not consist of chunks; `fill` adds these."""
        if not node.arrays:
            return cache
        resident = self._resident(node) if any(self._in_rows) else ()

        def stored(array: np.ndarray, axis: _Axis, in_rows: tuple[int, int] | None) -> Any:
            if in_rows is not None:
                layer, half = in_rows
                return resident[half][layer, None]
            return None if axis.tokens else array

        arrays = map(stored, node.arrays, self._axes, self._in_rows)  # ends before the host rows
        return filled(cache, cache.host, arrays)

    def _resident(self, node: Node) -> list[np.ndarray]:
        """Return keys and values [l, k, n, d] of the sinks and recent tokens up to a node's end."""
        slots = self._decoder.slots
        # As `Slots.positions`, which would wait for the device's other work.
        positions = np.full(slots.size, -1)
        positions[: slots.sinks] = np.arange(slots.sinks)
        recent = np.arange(max(slots.sinks, node.end - slots.window), node.end)
        positions[slots.sinks + (recent - slots.sinks) % slots.window] = recent
        layers, heads, _, width = node.arrays[-1].shape
        rows = np.zeros((layers, heads, slots.size, width), node.arrays[-1].dtype)
        for each in node.chain():
            here = (positions >= each.start) & (positions < each.end)
            rows[:, :, here] = each.arrays[-1][:, :, positions[here] - each.start]
        return np.split(rows, 2, axis=-1)

    def fill(self, node: Node, cache: Cache) -> Cache:
        """Write the chunk of a node to a cache that has those before it; the cache is donated."""
        size, host, leaves = self._size(node), cache.host, jax.tree.leaves(kept(cache))
        if host is not None:
            start, rows = _elements(node, self._rows, -1, size)
            host = fill_rows(self._decoder, host, 0, start, rows, size)
        for i, axis in enumerate(self._axes):
            if axis.tokens:
                start, part = _elements(node, axis, i, size)
                given = self._decoder, leaves[i], part, np.int32(start)
                leaves[i] = _put(*given, axis=axis.number)
        return with_kept(cache, host, leaves)

    def store(self, node: Node, reading: Reading) -> Node | None:
        """Store the chunk after `node` that ends at `reading.done`, and return its node.

        Wait until it is computed. Return None if neither it nor later ones can be stored.
        """
        whole = reading.done % self._chunk == 0
        lost = node is not self._root and node not in self._nodes  # evicted in the meantime
        if lost or not (whole or self._decoder.row_format.exact):
            return None
        new = Node(node, reading.tokens[node.end : reading.done])
        if new.key not in node.children:
            self._copy(new, reading.cache)
            node.children[new.key] = new
            self._nodes.add(new)
            self.bytes += new.bytes
        new = node.children[new.key]
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

    def _size(self, node: Node) -> int:
        """Return the compiled length of a chunk."""
        return next(size for size in chunk_lengths(self._chunk) if size >= node.count)

    def _copy(self, node: Node, cache: Cache) -> None:
        """Copy the chunk that a cache ends with to a node."""
        leaves = jax.tree.leaves(kept(cache))
        spans = [axis.span(node, self._size(node)) for axis in self._axes]
        for i, (axis, (start, count)) in enumerate(zip(self._axes, spans, strict=True)):
            if self._in_rows[i]:
                leaves[i] = np.zeros(0, leaves[i].dtype)
            elif axis.tokens:
                given = self._decoder, leaves[i], np.int32(start)
                leaves[i] = _cut(*given, axis=axis.number, count=count)
        for axis, (start, _), array in zip(self._axes, spans, jax.device_get(leaves), strict=True):
            first, end = axis.held(node)
            node.arrays.append(axis.of(array, first - start, end - start).copy())
        if cache.host is not None:
            rows = np.asarray(cache.host)[:, 0]
            node.arrays.append(self._rows.of(rows, node.start, node.end).copy())

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

    An element is of `tokens` tokens; 0 if later tokens may change every element. A chunk may change
    the elements of its tokens and of the `late` tokens before it.
    """

    number: int
    length: int
    capacity: int
    tokens: int
    late: int = 0

    def held(self, node: Node) -> tuple[int, int]:
        """Return the range of elements that a node holds."""
        if self.tokens:
            return max(0, node.start - self.late) // self.tokens, -(-node.end // self.tokens)
        return 0, -(-node.end * self.length // self.capacity) if self.number else self.length

    def span(self, node: Node, size: int) -> tuple[int, int]:
        """Return where a chunk of this compiled size begins, and its number of elements.

        At the end of the capacity it begins before the elements that the node holds.
        """
        if not self.tokens:
            return 0, self.length
        count = (size + self.late + 2 * (self.tokens - 1)) // self.tokens
        return max(0, min(self.held(node)[0], self.length - count)), min(count, self.length)

    def of(self, array: np.ndarray, begin: int, end: int) -> np.ndarray:
        return array[(*(slice(None),) * self.number, slice(begin, end))]


def _elements(node: Node, axis: _Axis, number: int, size: int) -> tuple[int, np.ndarray]:
    """Return the start of a node's chunk, and its elements in array `number`, 0 after its end.

    Earlier nodes have those before the node's own.
    """
    start, count = axis.span(node, size)
    shape, each, missing = list(node.arrays[number].shape), node, start + count
    shape[axis.number] = count
    elements = np.zeros(shape, node.arrays[number].dtype)
    while missing > start and each.parent is not None:
        first, end = axis.held(each)
        begin, end = max(first, start), min(end, missing)
        if begin < end:
            piece = axis.of(each.arrays[number], begin - first, end - first)
            axis.of(elements, begin - start, end - start)[...] = piece
        missing, each = min(missing, begin), each.parent
    return start, elements


@compiled(lambda at: at.rows, static_argnames=("axis", "count"))
def _cut(decoder: Decoder, leaf: Any, start: Any, *, axis: int, count: int) -> Any:
    return lax.dynamic_slice_in_dim(leaf, start, count, axis)


@compiled(lambda at: at.rows, donate_argnums=0, static_argnames="axis")
def _put(decoder: Decoder, leaf: Any, part: Any, start: Any, *, axis: int) -> Any:
    return lax.dynamic_update_slice_in_dim(leaf, part, start, axis)
