"""Hot set: fetched rows stay on the device, so that a step moves only rows that are missing.

Consecutive tokens attend to mostly the same rows. Per layer, sequence and KV head, h entries hold
the rows fetched last:

    place    [t]  entry of each host slot, -1 if its row is not on the device
    slots    [h]  its inverse: the host slot in each entry, -1 while it is empty
    used     [h]  position of the token that last requested the entry

`replacement` looks a request up and assigns the missing rows to the least recently used entries. A
transfer then moves the missing rows into their entries and returns all rows in the request's order,
so attention reads the same bits in the same order as without a hot set. Everything runs on the
device with static shapes.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax import cuda
from infinigen_jax.cache.host_array import BATCH_SPEC, ROWS_SPEC, sharded
from infinigen_jax.cuda import calls
from infinigen_jax.ops.indexing import look_up, put
from infinigen_jax.selection.select import Request, top_choice


class HotSet(NamedTuple):
    """Rows of one layer, in the host's row format, and their directory; `place` may be int16."""

    rows: Float[Array, "b k h w"]
    slots: Int[Array, "b k h"]
    used: Int[Array, "b k h"]
    place: Int[Array, "b k t"]

    @classmethod
    def empty(
        cls, batch: int, heads: int, size: int, width: int, capacity: int, dtype: Any
    ) -> "HotSet":
        """Return a hot set of `size` entries of `width` elements, for `capacity` host slots."""
        no_slot = jnp.full((batch, heads, size), -1, jnp.int32)
        # `place` is as long as the context, so its numbers are narrow.
        narrowest = jnp.int16 if size <= 2**15 else jnp.int32
        place = jnp.full((batch, heads, capacity), -1, narrowest)
        return cls(jnp.zeros((batch, heads, size, width), dtype), no_slot, no_slot, place)


class Replacement(NamedTuple):
    """Hot entry of each row of a request, and whether the row must move; 0, False for padding."""

    entry: Int[Array, "b k n"]
    miss: Bool[Array, "b k n"]


def replacement(
    hot: HotSet, request: Request, positions: Int[Array, " b"]
) -> tuple[HotSet, Replacement]:
    """Look a request up, and evict the least recently used entries for the missing rows.

    The request's slots are distinct and at most as many as entries (else ValueError); positions
    grow from step to step. Return the hot set with the new directory and the old rows, and the
    replacement for the transfer.
    """
    n, h = request.slots.shape[2], hot.slots.shape[2]
    capacity = hot.place.shape[2]
    if n > h:
        raise ValueError(f"a hot set of {h} entries is smaller than a request of {n} rows")
    valid = request.valid
    entry_of_slot = look_up(hot.place, request.slots).astype(jnp.int32)
    hit = valid & (entry_of_slot >= 0)
    miss = valid & (entry_of_slot < 0)
    now = jnp.broadcast_to(positions[:, None, None], hit.shape)
    used = put(hot.used, jnp.where(hit, entry_of_slot, h), now)
    # At most n - hits rows are missing, and h - hits entries are not requested: no hit is evicted.
    # Exact in float32: positions are below 2^24.
    missing = jnp.sum(miss, axis=-1, dtype=jnp.int32)
    victims, *_ = top_choice(-used.astype(jnp.float32), missing, n)
    turn = jnp.cumsum(miss, axis=-1, dtype=jnp.int32) - 1
    entry = jnp.where(miss, look_up(victims, jnp.maximum(turn, 0)), jnp.maximum(entry_of_slot, 0))
    entry = jnp.where(valid, entry, 0)

    target = jnp.where(miss, entry, h)
    evicted = jnp.where(miss, look_up(hot.slots, entry), -1)
    no_entry = jnp.full(miss.shape, -1, hot.place.dtype)
    place = put(hot.place, jnp.where(evicted >= 0, evicted, capacity), no_entry)
    place = put(place, jnp.where(miss, request.slots, capacity), entry.astype(hot.place.dtype))
    slots = put(hot.slots, target, request.slots)
    used = put(used, target, now)
    return HotSet(hot.rows, slots, used, place), Replacement(entry, miss)


def replace_entries(
    hot: HotSet, request: Request, positions: Int[Array, " b"], mesh: Mesh
) -> tuple[HotSet, Replacement]:
    """Return the result of `replacement`; on an NVIDIA GPU one kernel launch computes it."""
    if not cuda.in_use():
        return replacement(hot, request, positions)
    arrays = (request.slots, request.count, positions, hot.slots, hot.used, hot.place)
    rows = [ROWS_SPEC] * 5
    specs = (*rows[:2], BATCH_SPEC, *rows[:3])
    replaced = sharded(calls.replace_entries, mesh, specs, tuple(rows))
    entry, miss, slots, used, place = replaced(*arrays)
    return HotSet(hot.rows, slots, used, place), Replacement(entry, miss)


def forget(hot: HotSet, slots: Int[Array, "b k n"]) -> HotSet:
    """Empty the entries of host slots that receive another row; a slot of t is ignored."""
    h, capacity = hot.slots.shape[2], hot.place.shape[2]
    entry = look_up(hot.place, jnp.minimum(slots, capacity - 1)).astype(jnp.int32)
    target = jnp.where((slots < capacity) & (entry >= 0), entry, h)
    no_slot = jnp.full(slots.shape, -1, jnp.int32)
    return hot._replace(
        slots=put(hot.slots, target, no_slot),
        used=put(hot.used, target, no_slot),
        place=put(hot.place, slots, no_slot.astype(hot.place.dtype)),
    )
