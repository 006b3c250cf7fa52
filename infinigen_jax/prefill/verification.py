"""Verification: the full model over a few drafted tokens, and the commit of the accepted ones.

    verify    all layers over the last accepted token and k drafted ones. Every layer attends to all
              of its rows, which are read once for all of these tokens. Nothing is stored.
    commit    the rows of the accepted tokens are stored, as in prefill. Each sequence accepts its
              own number of tokens; rows of rejected ones are never written.

As in decode steps of the full cache, a row counts as exact while it is in the recent window and in
its stored form later. Results therefore do not depend on the number of drafted tokens, even with
int8 rows.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.layers import DenseLayer, Resident, Sliding
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.compiler_options import layer_options
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Weights
from infinigen_jax.decode.steps import host_numbers
from infinigen_jax.models import Params
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill.attention_mass import attention_mass
from infinigen_jax.prefill.compiled import embed
from infinigen_jax.prefill.layer import Done, device_rows, host_rows, layer_over
from infinigen_jax.prefill.narrow_attention import Seen, attend_narrow
from infinigen_jax.prefill.prefill import Look, RowStore, through_layers
from infinigen_jax.prefill.prior_rows import ChunkAttention, PriorRows
from infinigen_jax.transfer.host_weights import await_copy, start_next


class Observed(NamedTuple):
    """Queries of a layer and the sums of their softmax, for a policy that observes."""

    queries: Float[Array, "b c h d"]
    log_sum: Float[Array, "b c h"]


class Verified(NamedTuple):
    """Result of the layers over drafted tokens, after `start` tokens; rows are not stored yet."""

    x: Float[Array, "b c e"]
    start: Int[Array, " b"]
    rows: list[Float[Array, "b k c w"]]
    observed: list[Observed | None]


def verify(
    decoder: Decoder,
    weights: Weights,
    cache: Cache,
    tokens: Int[Array, "b n"],
    size: int,
    look: Look | None = None,
) -> Verified:
    """Compute all layers over the next tokens of each sequence, without waiting.

    Args:
        cache: cache whose rows are all on the host; it does not change.
        tokens: the last drawn token and drafted ones; negative tokens are padding.
        size: number of leading tokens to compute.
    """
    start = cache.lengths
    rows: list[Any] = []
    observed: list[Any] = []
    chunks, embedding = decoder.of_chunks, weights.params["embedding"]
    x = embed(chunks, embedding, tokens, Span(start, start), size=size)
    look = look or (lambda stage, x, start, count: None)
    counts = jnp.full_like(start, size)
    look(0, x, start, counts)

    def compute(i: int, params: Params, x: Array, stored: tuple[Params, ...]) -> tuple[Array, Any]:
        number = decoder.host_number(i)
        if number < 0:
            window = decoder.config.window_of(i)
            x, new, upcoming = _device_layer(
                decoder, params, x, cache.local[i], start, stored, window=window
            )
        else:
            x, new, seen, upcoming = _host_layer(
                decoder,
                params,
                x,
                cache.local[i],
                cache.scales[number],
                cache.host,
                host_numbers(decoder)[number],
                start,
                stored,
            )
            observed.append(None if decoder.streams(number) else seen)
        rows.append(new)
        look(i + 1, x, start, counts)
        return x, upcoming

    x = through_layers(decoder, weights, x, compute)
    return Verified(x, start, rows, observed)


def commit(
    decoder: Decoder,
    weights: Weights,
    cache: Cache,
    verified: Verified,
    accepted: Int[Array, " b"],
) -> Cache:
    """Store the rows of the leading accepted tokens, without waiting; the cache is donated."""
    store = RowStore(decoder, weights, cache)
    span = Span(verified.start, accepted)
    for i, rows in enumerate(verified.rows):
        number, observations = decoder.host_number(i), None
        if number >= 0:
            if (seen := verified.observed[number]) is not None:
                at = host_numbers(decoder)[number]
                mass = _mass(decoder, seen, rows, store.scales[number], store.host, at, span)
                observations = seen.queries, mass
        store.keep(i, rows, span, observations)
    return store.cache()._replace(lengths=_advance(decoder, verified.start, accepted))


@compiled(
    lambda at: (at.batch, at.rows, at.whole),
    layer_options,
    static_argnames="window",
    donate_argnums=1,
)
def _device_layer(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "b c e"],
    local: DenseLayer | Sliding,
    start: Int[Array, " b"],
    stored: tuple[Params, ...],
    *,
    window: int | None,
) -> tuple[Array, Array, Any]:
    upcoming, x = start_next(stored, x)
    prior = device_rows(local, Span(start, start), decoder.dtype)
    done = _layer(decoder, params, x, start, [], prior, window)
    upcoming, x = await_copy(upcoming, done.x)
    return x, done.rows, upcoming


@compiled(lambda at: (at.batch, at.rows, at.batch, at.whole), layer_options, donate_argnums=1)
def _host_layer(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "b c e"],
    local: Resident,
    scales: Any,
    host: Shaped[Array, "l a k t w"],
    number: Int[Array, ""],
    start: Int[Array, " b"],
    stored: tuple[Params, ...],
) -> tuple[Array, Array, Observed | None, Any]:
    upcoming, x = start_next(stored, x)
    near = resident_rows(decoder, local, scales, start, x.shape[1])
    prior = host_only_rows(decoder, host, number, scales, start)
    done = _layer(decoder, params, x, start, near, prior)
    upcoming, x = await_copy(upcoming, done.x)
    observes = decoder.policy.observes
    seen = Observed(done.queries, done.attended.log_sum) if observes else None
    return x, done.rows, seen, upcoming


@compiled(lambda at: at.rows, layer_options)
def _mass(
    decoder: Decoder,
    seen: Observed,
    rows: Float[Array, "b k c w"],
    scales: Any,
    host: Shaped[Array, "l a k t w"],
    number: Int[Array, ""],
    span: Span,
) -> Float[Array, "b k t"]:
    """Return the attention that a layer's rows receive from the accepted tokens."""
    keys = rows[..., : decoder.config.head_dim].swapaxes(1, 2)
    prior, cap = host_rows(decoder, host, number, scales, span), decoder.config.attention_softcap
    return attention_mass(seen.queries, keys, seen.log_sum, span, prior, cap)


@compiled(lambda at: at.batch)
def _advance(
    decoder: Decoder, start: Int[Array, " b"], accepted: Int[Array, " b"]
) -> Int[Array, " b"]:
    return start + accepted


def _layer(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "b c e"],
    start: Int[Array, " b"],
    near: list[Seen],
    prior: PriorRows,
    window: int | None = None,
) -> Done:
    """Compute one layer; every token attends to those before it in the chunk as well."""
    span = Span(start, start)
    positions, cap = span.positions(x.shape[1]), decoder.config.attention_softcap
    distance = positions[:, None] - positions[:, :, None]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window

    def attend(queries: Array, keys: Array, values: Array) -> ChunkAttention:
        drafted = Seen(keys.swapaxes(1, 2), values.swapaxes(1, 2), visible)
        ahead = not decoder.transfer.in_place
        return attend_narrow(queries, [drafted, *near], prior, positions, window, cap, ahead)

    return layer_over(decoder.blueprint.layer(params), x, positions, positions + 1, attend)


def host_only_rows(
    decoder: Decoder, host: Shaped[Array, "l a k t w"], number: Array, scales: Any, start: Array
) -> PriorRows:
    """Return the rows that only the host has when the next token is computed."""
    prior = host_rows(decoder, host, number, scales, Span(start, start))
    end = jnp.maximum(start - decoder.policy.window + 1, 0)
    return prior._replace(start=end, first=decoder.policy.sinks)


def resident_rows(
    decoder: Decoder, local: Resident, scales: Any, start: Int[Array, " b"], size: int
) -> list[Seen]:
    """Return sinks and recent rows for `size` tokens: exact in a token's window, else as stored."""
    sinks, window, stored = decoder.policy.sinks, decoder.policy.window, decoder.row_format
    places = decoder.slots.positions(start - 1)[:, :, None]
    kept = places < sinks
    # The oldest row of the ring has left it when the next token is computed.
    valid = (places >= 0) & (kept | (places > start[:, None, None] - window))
    keys, values = jnp.split(local.rows, 2, axis=-1)
    if stored.exact:
        return [Seen(keys, values, valid)]
    recent = kept | (Span(start, start).positions(size)[:, None] - places < window)
    old_keys, old_values = jnp.split(
        stored.decode(scales, stored.encode(scales, local.rows)), 2, axis=-1
    )
    return [
        Seen(keys, values, valid & recent),
        Seen(old_keys, old_values, valid & ~recent),
    ]
