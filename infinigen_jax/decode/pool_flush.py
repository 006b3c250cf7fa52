"""What the engine does with a host pool (`pool`): fill it from a prompt, and flush into it."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.host_array import gather_rows, store_rows
from infinigen_jax.cache.hot_set import forget
from infinigen_jax.cache.layers import Cache, Resident, sums_of_values
from infinigen_jax.cache.pool import Insertion, Kept, first_used, insert, of_prompt
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.models import Params
from infinigen_jax.ops.span import Span


def start_pool(decoder: Decoder, lengths: Int[Array, " b"], slots: int) -> Int[Array, "b k t"]:
    """Positions of the rows that the pool of a layer keeps of the prompts."""
    assert decoder.pool is not None
    heads, sinks = decoder.config.num_kv_heads, decoder.policy.sinks
    return of_prompt(decoder.pool, lengths, heads, slots, sinks)


def start_kept(decoder: Decoder, positions: Int[Array, "b k t"]) -> Kept:
    """What requests leave behind in a host layer that none was made for yet."""
    assert decoder.pool is not None
    b, _, t = positions.shape
    return Kept(first_used(decoder.pool, positions), decoder.empty_hot_set(b, t))


def flush(decoder: Decoder, policy: tuple[Params, ...], cache: Cache) -> Cache:
    """As `Decoder.flush`, into a pool: the rows of the ring take slots that are free or given up.

    Harmless at any time: rows that the pool has had already are not written again.
    """
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
    """Where the ring's rows go in the pool of a layer.

    A streamed layer uses all of its rows in every step, so that every order of eviction is fifo.
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
    """The sum of the values that only the host has, without those of the rows that give way.

    They are read back as they are stored. Rows enter the sum, later on, as they were before they
    were stored, so what storing them changes is added now.
    """
    assert cache.host is not None
    stored_rows, scales = decoder.row_format, cache.scales[number]
    old = jnp.minimum(place.slots, cache.host.shape[3] - 1)
    gone = gather_rows(cache.host, jnp.int32(number), old, decoder.mesh)
    left = left - sums_of_values(stored_rows.decode(scales, gone), place.evicted)
    if stored_rows.exact:
        return left
    new = place.slots < cache.host.shape[3]
    left = left + sums_of_values(stored_rows.decode(scales, stored), new)
    return left - sums_of_values(rows, new)
