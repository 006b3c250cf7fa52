"""The hot set: fetched rows stay on the device, so that a step moves only rows it does not have.

What a token attends to is mostly what the token before it attended to. Per layer, sequence and KV
head, h entries hold the rows fetched last:

    place    [t]  entry of each host slot, -1 if its row is not on the device
    slots    [h]  its inverse: the host slot in each entry, -1 while it is empty
    used     [h]  position of the token that last wanted the entry

`plan` looks a request up and gives the rows that are missing the entries of the least wanted ones.
A transfer then moves the missing rows into their entries and hands out all rows in the request's
order: attention reads the same bits in the same order as without a hot set. All of it is static
shapes on the device; the host is not asked.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax import cuda
from infinigen_jax.cache.host_array import BATCH_SPEC, ROWS_SPEC
from infinigen_jax.cuda import calls
from infinigen_jax.ops.indexing import look_up, put
from infinigen_jax.selection.select import Request, top_slots


class HotSet(NamedTuple):
    """Rows of one layer that are on the device, as the host stores them, and their directory."""

    rows: Float[Array, "b k h w"]
    slots: Int[Array, "b k h"]
    used: Int[Array, "b k h"]
    place: Int[Array, "b k t"]

    @classmethod
    def empty(
        cls, batch: int, heads: int, size: int, width: int, capacity: int, dtype: Any
    ) -> "HotSet":
        """With `size` entries of `width` elements, for a host cache of `capacity` slots."""
        nothing = jnp.full((batch, heads, size), -1, jnp.int32)
        place = jnp.full((batch, heads, capacity), -1, place_dtype(size))
        return cls(jnp.zeros((batch, heads, size, width), dtype), nothing, nothing, place)


class Plan(NamedTuple):
    """Where the rows of a request come from.

    Attributes:
        entry: the hot entry that has the row, or that is to get it; 0 for padding.
        miss: the row has to be moved from the host; False for padding.
    """

    entry: Int[Array, "b k n"]
    miss: Bool[Array, "b k n"]


def place_dtype(size: int) -> Any:
    """Narrowest integer type for entry numbers: `place` is as long as the context."""
    return jnp.int16 if size <= 2**15 else jnp.int32


def plan(hot: HotSet, request: Request, positions: Int[Array, " b"]) -> tuple[HotSet, Plan]:
    """Look a request up, and make room for what is missing: the least recently used are evicted.

    Args:
        hot: with h at least the request's n, so that everything missing finds an entry.
        request: distinct slots.
        positions: of the current tokens; they grow from step to step.

    Returns:
        The hot set with its directory as it is after the transfer, its rows as they were, and the
        plan that the transfer carries out.
    """
    n, h = request.slots.shape[2], hot.slots.shape[2]
    capacity = hot.place.shape[2]
    if n > h:
        raise ValueError(f"a hot set of {h} entries is smaller than a request of {n} rows")
    valid = request.valid
    found = look_up(hot.place, request.slots).astype(jnp.int32)
    hit = valid & (found >= 0)
    miss = valid & (found < 0)
    now = jnp.broadcast_to(positions[:, None, None], hit.shape)
    used = put(hot.used, jnp.where(hit, found, h), now)
    # At most n - hits rows are missing and h - hits entries are not wanted now: no hit is evicted.
    # Exact in float32: positions are below 2^24.
    victims = top_slots(-used.astype(jnp.float32), jnp.sum(miss, axis=-1, dtype=jnp.int32), n)
    turn = jnp.cumsum(miss, axis=-1, dtype=jnp.int32) - 1
    entry = jnp.where(miss, look_up(victims, jnp.maximum(turn, 0)), jnp.maximum(found, 0))
    entry = jnp.where(valid, entry, 0)

    target = jnp.where(miss, entry, h)
    evicted = jnp.where(miss, look_up(hot.slots, entry), -1)
    gone = jnp.full(miss.shape, -1, hot.place.dtype)
    place = put(hot.place, jnp.where(evicted >= 0, evicted, capacity), gone)
    place = put(place, jnp.where(miss, request.slots, capacity), entry.astype(hot.place.dtype))
    slots = put(hot.slots, target, request.slots)
    used = put(used, target, now)
    return HotSet(hot.rows, slots, used, place), Plan(entry, miss)


def plan_reuse(
    hot: HotSet, request: Request, positions: Int[Array, " b"], mesh: Mesh
) -> tuple[HotSet, Plan]:
    """Return what `plan` computes, on an NVIDIA GPU in one launch."""
    if not cuda.in_use():
        return plan(hot, request, positions)
    arrays = (request.slots, request.count, positions, hot.slots, hot.used, hot.place)
    rows = [ROWS_SPEC] * 5
    planned = jax.shard_map(
        calls.plan_reuse,
        mesh=mesh,
        in_specs=(*rows[:2], BATCH_SPEC, *rows[:3]),
        out_specs=tuple(rows),
        check_vma=False,
    )
    entry, miss, slots, used, place = planned(*arrays)
    return HotSet(hot.rows, slots, used, place), Plan(entry, miss)


def forget(hot: HotSet, slots: Int[Array, "b k n"]) -> HotSet:
    """Empty the entries of host slots that get another row; a slot of t is none."""
    h, capacity = hot.slots.shape[2], hot.place.shape[2]
    entry = look_up(hot.place, jnp.minimum(slots, capacity - 1)).astype(jnp.int32)
    target = jnp.where((slots < capacity) & (entry >= 0), entry, h)
    nothing = jnp.full(slots.shape, -1, jnp.int32)
    return hot._replace(
        slots=put(hot.slots, target, nothing),
        used=put(hot.used, target, nothing),
        place=put(hot.place, slots, nothing.astype(hot.place.dtype)),
    )
