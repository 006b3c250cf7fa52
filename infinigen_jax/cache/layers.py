"""Where the KV cache lives: the host array, and what stays on the device.

A layer's rows are kept in one of three forms.

`DenseLayer`: all of them on the device (the first layers, whose attention is broad).
`Sliding`: on the device, a ring of the layer's own window, which is all that it attends to.
`Resident`: all of them in the host array, slot = position (`pool` has what holds with a limit), and
on the device only the attention sinks and a ring of the most recent tokens, the current one
included:

    slot      0 .. sinks-1 | sinks .. sinks+window-1
    position  0 .. sinks-1 | the last `window` positions p >= sinks, at (p - sinks) mod window

New rows enter the ring before attention reads it. Every `window` steps the whole ring is flushed
to the host in one in-place update (`Decoder.flush`): from then on its rows may be fetched, which is
just in time, because position p becomes eligible when the ring forgets it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from infinigen_jax.cache.hot_set import HotSet
from infinigen_jax.cache.pool import Kept
from infinigen_jax.ops.attention import Part, packed
from infinigen_jax.ops.barriers import behind
from infinigen_jax.ops.bit_storage import from_kept, to_kept
from infinigen_jax.ops.span import Span, put_span

Summed = Callable[[Array], Array]  # of rows [b, k, n, w], what is summed of them [b, k, n, d]


class Slots(NamedTuple):
    """The geometry of the resident rows; static.

    Attributes:
        tail_block: tokens of a block of `Resident.left`; 0 if all are one.
    """

    sinks: int
    window: int
    tail_block: int = 0

    @property
    def size(self) -> int:
        return self.sinks + self.window

    def of(self, positions: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """Slot of a position, if it is resident."""
        ring = self.sinks + (positions - self.sinks) % self.window
        return jnp.where(positions < self.sinks, positions, ring)

    def positions(self, current: Int[Array, " b"]) -> Int[Array, "b n"]:
        """Position in each slot when `current` is the newest; -1 where a slot is still empty."""
        slot = jnp.arange(self.size, dtype=jnp.int32)[None]
        newest = current[:, None]
        ring = newest - (newest - slot) % self.window  # the sinks cancel: slot counts them too
        position = jnp.where(slot < self.sinks, slot, ring)
        lowest = jnp.where(slot < self.sinks, 0, self.sinks)
        return jnp.where((position >= lowest) & (position <= newest), position, -1)

    def blocks(self, capacity: int) -> int:
        """Blocks of a cache with room for `capacity` tokens."""
        return -(-capacity // self.tail_block) if self.tail_block else 1

    def eligible(self, current: Int[Array, " b"], capacity: int) -> Bool[Array, "b t"]:
        """Positions that only the host has: neither sinks nor in the ring."""
        position = jnp.arange(capacity, dtype=jnp.int32)[None]
        return (position >= self.sinks) & (position <= current[:, None] - self.window)


class DenseLayer(NamedTuple):
    """A layer's cache, wholly on the device; its numbers as they are kept there, see `bits`."""

    keys: Shaped[Array, "b k t d"]
    values: Shaped[Array, "b k t d"]

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: Any) -> "DenseLayer":
        """Of [b, k, t, d]."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def extend(self, rows: Float[Array, "b k c w"], span: Span) -> "DenseLayer":
        """A chunk's rows, in place where donated."""
        keys, values = jnp.split(to_kept(rows, self.keys.dtype), 2, axis=-1)
        return DenseLayer(
            put_span(self.keys, keys, span, axis=2), put_span(self.values, values, span, axis=2)
        )

    def write(
        self, key: Float[Array, "b k d"], value: Float[Array, "b k d"], position: Int[Array, " b"]
    ) -> "DenseLayer":
        """The current token's row, in place where donated."""
        return DenseLayer(_put(self.keys, key, position), _put(self.values, value, position))

    def part(self, position: Int[Array, " b"], dtype: Any) -> Part:
        """Everything up to the current token, as numbers of the model's dtype."""
        capacity = self.keys.shape[2]
        valid = jnp.arange(capacity, dtype=jnp.int32)[None] <= position[:, None]
        keys, values = (from_kept(x, dtype) for x in self)
        return Part(keys, values, valid[:, None])

    def near(self, position: Int[Array, " b"], slots: Slots, dtype: Any) -> Part:
        """Of that, what would be resident if this layer's cache were on the host."""
        return _picked(self, slots.positions(position), None, dtype)


class Sliding(NamedTuple):
    """The cache of a layer with a sliding window: position p at p mod n.

    n is the window, or the cache's capacity where that is less. Numbers are kept as in DenseLayer.
    """

    keys: Shaped[Array, "b k n d"]
    values: Shaped[Array, "b k n d"]

    @property
    def slots(self) -> Slots:
        return Slots(0, self.keys.shape[2])

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: Any) -> "Sliding":
        """Of [b, k, n, d]."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def extend(self, rows: Float[Array, "b k c w"], span: Span) -> "Sliding":
        """A chunk's rows, as far as they stay in the window."""
        keys, values = jnp.split(to_kept(rows, self.keys.dtype), 2, axis=-1)
        return Sliding(
            _moved_on(self.keys, keys, span, self.slots),
            _moved_on(self.values, values, span, self.slots),
        )

    def write(
        self, key: Float[Array, "b k d"], value: Float[Array, "b k d"], position: Int[Array, " b"]
    ) -> "Sliding":
        """The current token's row, in place where donated."""
        slot = self.slots.of(position)
        return Sliding(_put(self.keys, key, slot), _put(self.values, value, slot))

    def part(self, position: Int[Array, " b"], dtype: Any) -> Part:
        """The window of the current token, as numbers of the model's dtype."""
        valid = (self.slots.positions(position) >= 0)[:, None]
        keys, values = (from_kept(x, dtype) for x in self)
        return Part(keys, values, valid)

    def near(self, position: Int[Array, " b"], slots: Slots, dtype: Any) -> Part:
        """Of that, at most as many recent tokens as are resident of a layer on the host."""
        recent = Slots(0, min(slots.window, self.slots.window))
        return _picked(self, recent.positions(position), self.slots, dtype)


def values_of(rows: Float[Array, "*n w"]) -> Float[Array, "*n d"]:
    """The second half of rows."""
    return rows[..., rows.shape[-1] // 2 :]


class Resident(NamedTuple):
    """What stays on the device of a layer whose cache is on the host.

    Attributes:
        rows: sinks and recent tokens.
        left: sums of the values of all other tokens, those that only the host has, by blocks of
            positions; float32, None where no tail term asks for them. Or sums of what else of the
            rows [b, k, n, w] `summed` makes [b, k, n, d], see `Policy.tail_values`.
    """

    rows: Float[Array, "b k n w"]
    left: Float[Array, "b k m d"] | None = None

    @classmethod
    def empty(
        cls, batch: int, heads: int, width: int, slots: Slots, dtype: Any, blocks: int = 0
    ) -> "Resident":
        """Without any token.

        Args:
            blocks: keep the sums of the other tokens' values, by so many blocks.
        """
        rows = jnp.zeros((batch, heads, slots.size, width), dtype)
        left = jnp.zeros((batch, heads, blocks, width // 2), jnp.float32) if blocks else None
        return cls(rows, left)

    def extend(
        self, rows: Float[Array, "b k c w"], span: Span, slots: Slots, summed: Summed = values_of
    ) -> "Resident":
        """The sinks and last tokens, once a chunk's rows are added."""
        left, size = self.left, rows.shape[2]
        if left is not None:
            before = slots.positions(span.start - 1)
            left = _add_leaving(left, summed(self.rows), before, span, slots)
            new = jnp.where(span.holds(size), span.positions(size), -1)
            left = _add_leaving(left, summed(rows), new, span, slots)
        return Resident(_moved_on(self.rows, rows, span, slots), left)

    def write(
        self,
        row: Float[Array, "b k w"],
        position: Int[Array, " b"],
        slots: Slots,
        summed: Summed = values_of,
    ) -> "Resident":
        """The current token's row, in place where donated."""
        slot, rows, left = slots.of(position), self.rows, self.left
        if left is not None:
            leaving = jnp.take_along_axis(rows, slot[:, None, None, None], axis=2)
            # Read before it is overwritten, or XLA may copy the ring to read it later; not before
            # the new row is there, or it may do so under the transfer for an earlier layer.
            leaving, rows, row = lax.optimization_barrier((leaving, rows, row))
            gone = position - slots.window
            values = summed(leaving)[:, :, 0].astype(jnp.float32)
            values = jnp.where((gone >= slots.sinks)[:, None, None], values, 0.0)
            block = jnp.maximum(gone, 0) // slots.tail_block if slots.tail_block else gone * 0
            at = block[:, None, None, None]
            before = jnp.take_along_axis(left, at, axis=2)[:, :, 0]
            left = _put(left, before + values, block)
            # What the barrier does elsewhere: XLA removes it for a CPU before it decides on copies.
            made = jnp.take_along_axis(left, at, axis=2)[:, :, 0]
            row = lax.platform_dependent(row, made, cpu=behind, default=lambda row, _: row)
        return Resident(_put(rows, row, slot), left)

    def part(self, position: Int[Array, " b"], slots: Slots) -> Part:
        """Sinks and recent tokens, the current one included."""
        return packed(self.rows, (slots.positions(position) >= 0)[:, None])

    def near(self, position: Int[Array, " b"], slots: Slots, dtype: Any) -> Part:
        """All of it."""
        return self.part(position, slots)

    def since(self, start: Int[Array, " b"], slots: Slots) -> Float[Array, "b k n w"]:
        """The `window` rows from position `start` on, in order of position."""
        positions = start[:, None] + jnp.arange(slots.window, dtype=jnp.int32)[None]
        return jnp.take_along_axis(self.rows, slots.of(positions)[:, None, :, None], axis=2)


Local = DenseLayer | Sliding | Resident  # what the device keeps of a layer


class HostLayer(NamedTuple):
    """Where and how the host keeps a layer's rows.

    Attributes:
        number: among the layers on the host.
        scales: what it takes to decode the rows, see `rows.RowFormat`.
        key_mean: that the index's keys are less by, for the tail term; None if they are not.
        positions: of the rows in its pool; None where slot = position.
        tail: the policy's weights and state of this layer, for a tail by its own query.
    """

    number: Int[Array, ""]
    scales: Any
    key_mean: Float[Array, "k d"] | None = None
    positions: Int[Array, "b k t"] | None = None
    tail: Any = None


class ReadCache(NamedTuple):
    """The part of a cache that a decode step only reads.

    Attributes:
        host: rows of the layers kept on the host, as `rows.RowFormat` stores them; None if there
            are none.
        scales: of the stored rows, for each layer on the host.
        states: what the policy keeps on the device for each of them (an index); empty if it
            observes, as steps replace them then.
        pool: positions of each host layer's rows; empty without a limit, slot = position then.
    """

    host: Shaped[Array, "l a k t w"] | None
    scales: tuple[Any, ...]
    states: tuple[Any, ...]
    pool: tuple[Int[Array, "b k t"], ...]

    def pool_of(self, number: int) -> Int[Array, "b k t"] | None:
        """Positions of a host layer's rows; None where slot = position."""
        return self.pool[number] if self.pool else None


class StepCache(NamedTuple):
    """The part of a cache that a decode step replaces; its arrays are donated.

    Attributes:
        local: of every layer, what the device keeps.
        hot: the hot set of each layer on the host; None where it has none. With a pool, what
            requests leave behind in it as well.
        states: the policy's, if it observes; else empty.
        lengths: tokens cached per sequence.
    """

    local: tuple[Local, ...]
    hot: tuple[HotSet | Kept | None, ...]
    states: tuple[Any, ...]
    lengths: Int[Array, " b"]


class Cache(NamedTuple):
    """Everything a generation in progress has cached; see `ReadCache` and `StepCache`.

    Attributes:
        states: the policy's, whichever part they belong to.
    """

    host: Shaped[Array, "l a k t w"] | None
    states: tuple[Any, ...]
    local: tuple[Local, ...]
    lengths: Int[Array, " b"]
    scales: tuple[Any, ...] = ()
    hot: tuple[HotSet | Kept | None, ...] = ()
    pool: tuple[Int[Array, "b k t"], ...] = ()

    def pool_of(self, number: int) -> Int[Array, "b k t"] | None:
        """Positions of a host layer's rows; None where slot = position."""
        return self.pool[number] if self.pool else None

    def parts(self, observes: bool) -> tuple[ReadCache, StepCache]:
        """Split into what a step reads and what it replaces.

        Args:
            observes: whether the policy does.
        """
        read, replaced = ((), self.states) if observes else (self.states, ())
        return (
            ReadCache(self.host, self.scales, read, self.pool),
            StepCache(self.local, self.hot, replaced, self.lengths),
        )

    def stepped(self, new: StepCache) -> "Cache":
        """The cache after a step."""
        states = new.states or self.states
        return self._replace(local=new.local, hot=new.hot, states=states, lengths=new.lengths)


def sums_of_values(
    rows: Float[Array, "b k n w"], counted: Bool[Array, "b kv n"], blocks: int = 1, size: int = 0
) -> Float[Array, "b k m d"]:
    """Sums over the rows that count; the others may hold anything. Float32.

    Args:
        blocks, size: the number m of blocks, and how many rows each has; 0: one has all.
    """
    values = jnp.where(counted[..., None], values_of(rows).astype(jnp.float32), 0.0)
    b, k, n, d = values.shape
    size = size or n
    values = jnp.pad(values, ((0, 0), (0, 0), (0, blocks * size - n), (0, 0)))
    return jnp.sum(values.reshape(b, k, blocks, size, d), axis=3)


def _picked(
    layer: DenseLayer | Sliding, positions: Int[Array, "b n"], slots: Slots | None, dtype: Any
) -> Part:
    """The rows of some positions; of -1, none.

    Args:
        slots: that the layer keeps them in; None where slot = position.
    """
    there = jnp.maximum(positions, 0)
    at = (there if slots is None else slots.of(there))[:, None, :, None]
    keys, values = (from_kept(jnp.take_along_axis(x, at, axis=2), dtype) for x in layer)
    return Part(keys, values, (positions >= 0)[:, None])


def _moved_on(
    ring: Shaped[Array, "b k n w"], rows: Shaped[Array, "b k c w"], span: Span, slots: Slots
) -> Shaped[Array, "b k n w"]:
    """Resident rows, once a chunk's rows are added."""
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
    """Add the values of those tokens that a chunk drives out; a position below 0 is none."""
    leaves = (positions >= slots.sinks) & (positions < span.end[:, None] - slots.window)
    values = jnp.where(leaves[:, None, :, None], values.astype(jnp.float32), 0.0)
    if not slots.tail_block:
        return left + jnp.sum(values, axis=2, keepdims=True)
    block = jnp.where(leaves, positions // slots.tail_block, left.shape[2])[:, None]
    batch = jnp.arange(left.shape[0], dtype=jnp.int32)[:, None, None]
    head = jnp.arange(left.shape[1], dtype=jnp.int32)[None, :, None]
    return left.at[batch, head, block].add(values, mode="drop")


def _put(
    cache: Shaped[Array, "b k t w"], row: Float[Array, "b k w"], slot: Int[Array, " b"]
) -> Shaped[Array, "b k t w"]:
    """cache[i, j, slot[i]] = row[i, j] as one scatter with the batch axes leading."""
    batch = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
    head = jnp.arange(cache.shape[1], dtype=jnp.int32)[None]
    return cache.at[batch, head, slot[:, None]].set(
        to_kept(row, cache.dtype), mode="promise_in_bounds", unique_indices=True
    )
