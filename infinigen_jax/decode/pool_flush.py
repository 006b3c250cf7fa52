"""Flush of rings into a host pool (`cache.pool`)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import gather_rows, store_rows
from infinigen_jax.cache.hot_set import forget
from infinigen_jax.cache.layers import Resident, storage_error, sums_of_values
from infinigen_jax.cache.pool import Insertion, Kept, insert
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.models import Params
from infinigen_jax.ops.span import Span


def flush(decoder: Decoder, policy: tuple[Params, ...], cache: Cache) -> Cache:
    """Flush all rings into free or evicted slots of a pool; rows it already holds stay as is."""
    assert cache.host is not None and decoder.pool is not None
    start = jnp.maximum(cache.lengths - decoder.policy.window, 0)
    host_locals = [local for local in cache.local if isinstance(local, Resident)]
    rows = [local.since(start, decoder.slots) for local in host_locals]
    pairs = zip(cache.scales, rows, strict=True)
    stored = [decoder.row_format.encode(scales, new) for scales, new in pairs]
    places = [_insertion(decoder, cache, number, start) for number in range(len(rows))]
    local, states, hot = list(cache.local), list(cache.states), list(cache.hot)
    for i, place in enumerate(places):
        resident = host_locals[i]
        if resident.left is not None:
            left = _left(decoder, cache, i, resident.left, rows[i], stored[i], place)
            local[decoder.on_host[i]] = resident._replace(left=left)
        kept = hot[i]
        if isinstance(kept, Kept):
            held = None if kept.hot is None else forget(kept.hot, place.slots)
            hot[i] = Kept(place.used, held)
            keys = rows[i][..., : decoder.config.head_dim]
            span = Span(start, jnp.full_like(start, decoder.policy.window))
            states[i] = decoder.policy.append(policy[i], states[i], keys, span, place.slots)
    slots = jnp.stack([place.slots for place in places])
    host = store_rows(cache.host, jnp.stack(stored), slots, decoder.mesh)
    return cache._replace(
        host=host,
        states=tuple(states),
        local=tuple(local),
        hot=tuple(hot),
        pool=tuple(place.positions for place in places),
    )


def _insertion(decoder: Decoder, cache: Cache, number: int, start: Int[Array, " b"]) -> Insertion:
    """Choose the slots for the ring's rows in the pool of a layer.

    A streamed layer uses all its rows in every step, so every eviction order equals fifo.
    """
    assert decoder.pool is not None
    new = start[:, None] + jnp.arange(decoder.policy.window, dtype=jnp.int32)[None]
    kept = cache.hot[number]
    used = kept.used if isinstance(kept, Kept) else None
    return insert(decoder.pool, cache.pool[number], used, new, cache.lengths, decoder.policy.sinks)


def _left(
    decoder: Decoder,
    cache: Cache,
    number: int,
    left: Float[Array, "b k 1 d"],
    rows: Float[Array, "b k n w"],
    stored: Any,
    place: Insertion,
) -> Float[Array, "b k 1 d"]:
    """Return the sum of the values that only the host has, without those of evicted rows.

    Evicted rows are read back in their stored form. New rows later enter the sum in their original
    form, so the rounding error of storing them is added here.
    """
    assert cache.host is not None
    stored_rows, scales = decoder.row_format, cache.scales[number]
    old = jnp.minimum(place.slots, cache.host.shape[3] - 1)
    evicted_rows = gather_rows(cache.host, jnp.int32(number), old, decoder.mesh)
    left = left - sums_of_values(stored_rows.decode(scales, evicted_rows), place.evicted)
    new = place.slots < cache.host.shape[3]
    return left + storage_error(stored_rows, scales, stored, rows, new)
