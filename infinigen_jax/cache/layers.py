"""Rows of the cache that stay on the device, by layer; `cache.cache` is the complete cache.

A layer keeps its rows (K and V of one token in one KV head) in one of three forms.

`DenseLayer`: all rows on the device (the first layers, whose attention is broad).
`Sliding`: a ring on the device, as long as the layer's sliding window.
`Resident`: all rows in the host array with slot = position (`cache.pool` describes the limited
host cache). On the device only the attention sinks and a ring of the most recent tokens, including
the current one:

    slot      0 .. sinks-1 | sinks .. sinks+window-1
    position  0 .. sinks-1 | the last `window` positions p >= sinks, at (p - sinks) mod window

New rows enter the ring before attention reads it. Every `window` steps the whole ring is flushed
to the host in one in-place update (`Decoder.flush`), after which its rows may be fetched. This is
just in time: a position becomes eligible in the step that overwrites its row in the ring.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from infinigen_jax.cache.row_format import RowFormat
from infinigen_jax.ops.attention import Part
from infinigen_jax.ops.barriers import after
from infinigen_jax.ops.bit_storage import from_kept, to_kept
from infinigen_jax.ops.indexing import by_head
from infinigen_jax.ops.span import Span, put_span

Summed = Callable[[Array], Array]  # maps rows [b, k, n, w] to the terms of their sum [b, k, n, d]


class Slots(NamedTuple):
    """Static geometry of the resident rows; a `tail_block` of 0 is one block of `Resident.left`."""

    sinks: int
    window: int
    tail_block: int = 0

    @property
    def size(self) -> int:
        """Number of resident rows."""
        return self.sinks + self.window

    def of(self, positions: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Return the slot of a position, if it is resident."""
        ring = self.sinks + (positions - self.sinks) % self.window
        return jnp.where(positions < self.sinks, positions, ring)

    def positions(self, current: Int[Array, " b"]) -> Int[Array, "b n"]:
        """Return the position in each slot when `current` is the newest; -1 in empty slots."""
        slot = jnp.arange(self.size, dtype=jnp.int32)[None]
        newest = current[:, None]
        ring = newest - (newest - slot) % self.window  # the number of sinks cancels out
        position = jnp.where(slot < self.sinks, slot, ring)
        lowest = jnp.where(slot < self.sinks, 0, self.sinks)
        return jnp.where((position >= lowest) & (position <= newest), position, -1)

    def blocks(self, capacity: int) -> int:
        """Return the number of tail blocks of a cache for `capacity` tokens."""
        return -(-capacity // self.tail_block) if self.tail_block else 1

    def eligible(self, current: Int[Array, " b"], capacity: int) -> Bool[Array, "b 1 t"]:
        """Return the mask of host-only positions, neither sinks nor in the ring, for all heads."""
        position = jnp.arange(capacity, dtype=jnp.int32)[None, None]
        return (position >= self.sinks) & (position <= current[:, None, None] - self.window)


class DenseLayer(NamedTuple):
    """Cache of a layer that is entirely on the device, in the dtype of `ops.bit_storage`."""

    keys: Shaped[Array, "b k t d"]
    values: Shaped[Array, "b k t d"]

    def extend(self, rows: Float[Array, "b k c w"], span: Span) -> "DenseLayer":
        """Add a chunk's rows, in place if donated."""
        new = jnp.split(to_kept(rows, self.keys.dtype), 2, axis=-1)
        return DenseLayer(*(put_span(x, n, span, axis=2) for x, n in zip(self, new, strict=True)))

    def write(
        self, key: Float[Array, "b k d"], value: Float[Array, "b k d"], position: Int[Array, " b"]
    ) -> "DenseLayer":
        """Add the current token's row, in place if donated."""
        return DenseLayer(_put(self.keys, key, position), _put(self.values, value, position))

    def part(self, position: Int[Array, " b"], dtype: Any) -> Part:
        """Return all rows up to the current token, in the model's dtype."""
        valid = jnp.arange(self.keys.shape[2], dtype=jnp.int32)[None] <= position[:, None]
        keys, values = (from_kept(x, dtype) for x in self)
        return Part(keys, values, valid[:, None])

    def near(self, position: Int[Array, " b"], slots: Slots, dtype: Any) -> Part:
        """Return the rows that would be resident if this layer's cache were on the host."""
        return _picked(self, slots.positions(position), dtype)


class Sliding(NamedTuple):
    """Cache of a layer with a sliding window: a ring with position p in slot p mod n."""

    keys: Shaped[Array, "b k n d"]  # n is the smaller of window and capacity; dtype as DenseLayer's
    values: Shaped[Array, "b k n d"]

    @property
    def slots(self) -> Slots:
        return Slots(0, self.keys.shape[2])

    def extend(self, rows: Float[Array, "b k c w"], span: Span) -> "Sliding":
        """Add the chunk's rows that stay in the window."""
        new = jnp.split(to_kept(rows, self.keys.dtype), 2, axis=-1)
        return Sliding(*(_moved_on(x, n, span, self.slots) for x, n in zip(self, new, strict=True)))

    def write(
        self, key: Float[Array, "b k d"], value: Float[Array, "b k d"], position: Int[Array, " b"]
    ) -> "Sliding":
        """Add the current token's row, in place if donated."""
        slot = self.slots.of(position)
        return Sliding(_put(self.keys, key, slot), _put(self.values, value, slot))

    def part(self, position: Int[Array, " b"], dtype: Any) -> Part:
        """Return the window of the current token, in the model's dtype."""
        valid = (self.slots.positions(position) >= 0)[:, None]
        keys, values = (from_kept(x, dtype) for x in self)
        return Part(keys, values, valid)

    def near(self, position: Int[Array, " b"], slots: Slots, dtype: Any) -> Part:
        """Return the most recent rows, at most as many as are resident for a host layer."""
        recent = Slots(0, min(slots.window, self.slots.window))
        return _picked(self, recent.positions(position), dtype)


def values_of(rows: Float[Array, "*n w"]) -> Float[Array, "*n d"]:
    """Return the values, the second half of rows."""
    return rows[..., rows.shape[-1] // 2 :]


class Resident(NamedTuple):
    """Device part of a layer whose cache is on the host."""

    keys: Float[Array, "b k n d"]
    values: Float[Array, "b k n d"]
    # Sums of the values (or `Policy.tail_values`) of all other tokens, which only the host has, by
    # block of positions; None without a tail.
    left: Float[Array, "b k m d"] | None = None

    @classmethod
    def empty(
        cls, batch: int, heads: int, head_dim: int, slots: Slots, dtype: Any, blocks: int = 0
    ) -> "Resident":
        """Return the device part of an empty cache, with sums of `blocks` blocks; 0 for none."""
        keys, values = (jnp.zeros((batch, heads, slots.size, head_dim), dtype) for _ in range(2))
        left = jnp.zeros((batch, heads, blocks, head_dim), jnp.float32) if blocks else None
        return cls(keys, values, left)

    @property
    def rows(self) -> Float[Array, "b k n w"]:
        """Copy of keys and values, concatenated."""
        return jnp.concatenate([self.keys, self.values], axis=-1)

    def extend(
        self, rows: Float[Array, "b k c w"], span: Span, slots: Slots, summed: Summed = values_of
    ) -> "Resident":
        """Add a chunk's rows: keep sinks and recent tokens; sum the rows that leave the ring."""
        left, size = self.left, rows.shape[2]
        if left is not None:
            before = slots.positions(span.start - 1)
            left = _add_leaving(left, summed(self.rows), before, span, slots)
            new = jnp.where(span.holds(size), span.positions(size), -1)
            left = _add_leaving(left, summed(rows), new, span, slots)
        keys, values = jnp.split(rows, 2, axis=-1)
        keys = _moved_on(self.keys, keys, span, slots)
        return Resident(keys, _moved_on(self.values, values, span, slots), left)

    def write(
        self,
        key: Float[Array, "b k d"],
        value: Float[Array, "b k d"],
        position: Int[Array, " b"],
        slots: Slots,
        summed: Summed = values_of,
    ) -> "Resident":
        """Add the current token's row, in place if donated; see `extend`."""
        slot, left = slots.of(position), self.left
        rows, new = (self.keys, self.values), (key, value)
        if left is not None:
            leaving = self._rows_at(slot[:, None])
            # The barrier fixes two orders. The old row is read before it is overwritten, or XLA may
            # copy the ring. It is read after the new row is known, or XLA may read it during the
            # transfer for an earlier layer.
            leaving, rows, new = lax.optimization_barrier((leaving, rows, new))
            left_at = position - slots.window
            values = summed(leaving)[:, :, 0].astype(jnp.float32)
            values = jnp.where((left_at >= slots.sinks)[:, None, None], values, 0.0)
            block = jnp.maximum(left_at, 0) // slots.tail_block if slots.tail_block else left_at * 0
            at = block[:, None, None, None]
            before = jnp.take_along_axis(left, at, axis=2)[:, :, 0]
            left = _put(left, before + values, block)
            # XLA:CPU removes the barrier before it inserts copies; `after` keeps the order.
            block_sum = jnp.take_along_axis(left, at, axis=2)[:, :, 0]
            new = lax.platform_dependent(new, block_sum, cpu=after, default=lambda new, _: new)
        keys, values = (_put(x, row, slot) for x, row in zip(rows, new, strict=True))
        return Resident(keys, values, left)

    def part(self, position: Int[Array, " b"], slots: Slots) -> Part:
        """Return sinks and recent tokens, including the current one."""
        return Part(self.keys, self.values, (slots.positions(position) >= 0)[:, None])

    def since(self, start: Int[Array, " b"], slots: Slots) -> Float[Array, "b k n w"]:
        """Return the `window` rows from position `start` on, in order of position."""
        positions = start[:, None] + jnp.arange(slots.window, dtype=jnp.int32)[None]
        return self._rows_at(slots.of(positions))

    def _rows_at(self, slots: Int[Array, "b m"]) -> Float[Array, "b k m w"]:
        at, rows = slots[:, None, :, None], (self.keys, self.values)
        return jnp.concatenate([jnp.take_along_axis(x, at, axis=2) for x in rows], axis=-1)


Local = DenseLayer | Sliding | Resident  # rows that the device keeps of a layer


def sums_of_values(
    rows: Float[Array, "b k n w"], counted: Bool[Array, "b kv n"]
) -> Float[Array, "b k 1 d"]:
    """Return the sums of the values of the counted rows, float32; other rows may hold anything."""
    values = jnp.where(counted[..., None], values_of(rows).astype(jnp.float32), 0.0)
    return jnp.sum(values, axis=2, keepdims=True)


def storage_error(
    stored: RowFormat, scales: Any, encoded: Array, rows: Array, counted: Bool[Array, "b k n"]
) -> Float[Array, "b k 1 d"] | float:
    """Return how much storing the counted rows changes the sum of their values."""
    if stored.exact:
        return 0.0
    decoded = stored.decode(scales, encoded)
    return sums_of_values(decoded, counted) - sums_of_values(rows, counted)


def _picked(layer: DenseLayer | Sliding, positions: Int[Array, "b n"], dtype: Any) -> Part:
    """Return the rows of some positions, invalid for -1."""
    slots = jnp.maximum(positions, 0) % layer.keys.shape[2]  # of all rows, or of a ring
    at = slots[:, None, :, None]
    keys, values = (from_kept(jnp.take_along_axis(x, at, axis=2), dtype) for x in layer)
    return Part(keys, values, (positions >= 0)[:, None])


def _moved_on(
    ring: Shaped[Array, "b k n w"], rows: Shaped[Array, "b k c w"], span: Span, slots: Slots
) -> Shaped[Array, "b k n w"]:
    """Return resident rows with a chunk's rows added."""
    positions = slots.positions(span.end - 1)
    new = jnp.clip(positions - span.start[:, None], 0, rows.shape[2] - 1)
    new = jnp.take_along_axis(rows, new[:, None, :, None], axis=2)
    fresh = (positions >= span.start[:, None])[:, None, :, None]
    return jnp.where(fresh, new.astype(ring.dtype), ring)


def _add_leaving(
    left: Float[Array, "b k m d"],
    values: Float[Array, "b k n d"],
    positions: Int[Array, "b n"],
    span: Span,
    slots: Slots,
) -> Float[Array, "b k m d"]:
    """Add the values of the tokens that a chunk drives out; positions below 0 are ignored."""
    leaves = (positions >= slots.sinks) & (positions < span.end[:, None] - slots.window)
    values = jnp.where(leaves[:, None, :, None], values.astype(jnp.float32), 0.0)
    if not slots.tail_block:
        return left + jnp.sum(values, axis=2, keepdims=True)
    block = jnp.where(leaves, positions // slots.tail_block, left.shape[2])[:, None]
    return by_head(left, block).add(values, mode="drop")


def _put(
    cache: Shaped[Array, "b k t w"], row: Float[Array, "b k w"], slot: Int[Array, " b"]
) -> Shaped[Array, "b k t w"]:
    """Set cache[i, j, slot[i]] = row[i, j], as one scatter with the batch axes leading."""
    batch = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
    head = jnp.arange(cache.shape[1], dtype=jnp.int32)[None]
    return cache.at[batch, head, slot[:, None]].set(
        to_kept(row, cache.dtype), mode="promise_in_bounds", unique_indices=True
    )
