"""Host pool: a limited host cache whose slots are reused (section 4.4 of the paper).

Without a limit, a row's slot is its position. With one, the host keeps t rows per layer, sequence
and KV head for any context length. A directory on the device describes the slots:

    positions  [t]  position of the token in each slot, -1 while it is free
    used       [t]  key of the eviction order, updated by every request

When the recent window is flushed, its rows take free slots, then the slots of the rows that come
first in the eviction order; among equal rows the oldest is evicted first:

    fifo     by position
    lru      by the last request; a row that was never requested counts from its own position
    counter  by the number of requests; when a counter is full, all of its KV head's are halved

The first `sinks` tokens and the most recent ones are never evicted. Everything is per sequence and
KV head, on the device, with static shapes.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from infinigen_jax.cache.hot_set import HotSet
from infinigen_jax.ops.compaction import compact
from infinigen_jax.ops.indexing import look_up, put
from infinigen_jax.ops.top_k import top_mask
from infinigen_jax.selection.select import Request
from infinigen_jax.settings.pool import Pool

COUNTER_BITS = 8


class Hot(NamedTuple):
    """Device state of a host layer's requests, replaced by every step.

    Attributes:
        used: order of eviction from the pool; None without a pool, and for fifo.
        entries: the hot set, if any.
    """

    used: Shaped[Array, "b k t"] | None = None
    entries: HotSet | None = None


def held(
    positions: Int[Array, "b k t"], current: Int[Array, " b"], window: int
) -> Int[Array, "b k t"]:
    """Return positions of the rows that only the host has; -1 in all other slots."""
    inside = (positions >= 0) & (positions <= current[:, None, None] - window)
    return jnp.where(inside, positions, -1)


def first_used(pool: Pool, positions: Int[Array, "b k t"]) -> Shaped[Array, "b k t"] | None:
    """Return `used` before any request; None for fifo."""
    if pool.eviction == "fifo":
        return None
    if pool.eviction == "lru":
        return jnp.maximum(positions, 0)
    return jnp.zeros(positions.shape, jnp.uint8)


def touch(
    pool: Pool, used: Shaped[Array, "b k t"], request: Request, current: Int[Array, " b"]
) -> Shaped[Array, "b k t"]:
    """Return `used` after a request at the positions `current`; in place if donated."""
    slots, valid = request.slots, request.valid
    target = jnp.where(valid, slots, used.shape[2])
    if pool.eviction == "lru":
        return put(used, target, jnp.broadcast_to(current[:, None, None], slots.shape))
    counts = look_up(used, slots) + jnp.uint8(1)
    full = jnp.any(valid & (counts == 2**COUNTER_BITS - 1), axis=-1, keepdims=True)
    used = put(used, target, counts)
    return jnp.where(full, used >> 1, used)


class Insertion(NamedTuple):
    """Slots of new rows, and the directory after their insertion."""

    slots: Int[Array, "b k n"]  # t for a row that the pool does not take
    evicted: Bool[Array, "b k n"]  # whether the slot held another row
    positions: Int[Array, "b k t"]
    used: Shaped[Array, "b k t"] | None


def insert(
    pool: Pool,
    positions: Int[Array, "b k t"],
    used: Shaped[Array, "b k t"] | None,
    new: Int[Array, "b n"],
    lengths: Int[Array, " b"],
    sinks: int,
) -> Insertion:
    """Make room for the rows of a window, at positions `new`, ascending and without gaps.

    Three kinds of rows are left out: rows already in the pool, rows after a sequence's end, and
    sinks that stay on the device. `used` is None for fifo, and for a layer without requests.
    """
    (_, _, t), n = positions.shape, new.shape[1]
    latest = jnp.max(positions, axis=-1, keepdims=True)
    valid = (new >= sinks) & (new < lengths[:, None])
    fresh = valid[:, None] & (new[:, None] > latest)
    need = jnp.sum(fresh, axis=-1, dtype=jnp.int32)
    room = compact(_leaving(pool, positions, used, need, lengths, n), n)
    turn = jnp.maximum(jnp.cumsum(fresh, axis=-1, dtype=jnp.int32) - 1, 0)
    chosen = look_up(room, turn)
    evicted = fresh & (look_up(positions, chosen) >= 0)
    slots = jnp.where(fresh, chosen, t)
    arrived = jnp.broadcast_to(new[:, None], slots.shape)
    if used is not None:
        start = arrived if pool.eviction == "lru" else jnp.zeros_like(arrived)
        used = put(used, slots, start.astype(used.dtype))
    return Insertion(slots, evicted, put(positions, slots, arrived), used)


def _leaving(
    pool: Pool,
    positions: Int[Array, "b k t"],
    used: Shaped[Array, "b k t"] | None,
    need: Int[Array, "b k"],
    lengths: Int[Array, " b"],
    window: int,
) -> Bool[Array, "b k t"]:
    """Mark the `need` slots that come first in the eviction order: free slots, then rows in use.

    Spared are the first `pool.sinks` tokens and the most recent ones: `pool.recent` of the slots,
    and at least the window, whose rows the device still has.
    """
    t = positions.shape[2]
    recent = max(min(int(t * pool.recent), t - pool.sinks), window)
    safe = (positions >= 0) & (positions < pool.sinks)
    safe |= positions >= lengths[:, None, None] - recent
    # Exact in float32: positions are below 2^24.
    age = -positions.astype(jnp.float32)
    order = jnp.zeros_like(age) if used is None else -used.astype(jnp.float32)
    order = jnp.where(positions < 0, 1.0, jnp.where(safe, -jnp.inf, order))
    first = top_mask(order, need)
    last = jnp.min(jnp.where(first, order, jnp.inf), axis=-1, keepdims=True)
    before = order > last
    rest = need - jnp.sum(before, axis=-1, dtype=jnp.int32)
    return before | top_mask(jnp.where(order == last, age, -jnp.inf), rest)


def of_prompt(
    pool: Pool, lengths: Int[Array, " b"], heads: int, slots: int, sinks: int
) -> Int[Array, "b k t"]:
    """Return `positions` after a prompt: all of it if it fits, else its end.

    The first `pool.sinks` tokens are kept in any case. One program serves all prompt lengths.
    """
    slot, lengths = jnp.arange(slots, dtype=jnp.int32)[None], lengths[:, None]
    first = sinks + slot
    begins = (lengths <= sinks + slots) | (first < pool.sinks)
    kept = jnp.where(begins, first, lengths - slots + slot)
    kept = jnp.where(kept < lengths, kept, -1)
    return jnp.broadcast_to(kept[:, None], (len(lengths), heads, slots))
