"""Verification: the full model over a few drafted tokens, and the commit of the accepted ones.

    verify    all layers over the last accepted token and k drafted ones. Every layer attends to all
              of its rows, which are read once for all of these tokens. Nothing is stored.
    commit    the rows of the accepted tokens are stored, as in prefill. Each sequence accepts its
              own number of tokens; rows of rejected ones are never written.

As in decode steps of the full cache, a row counts as exact while it is in the recent window and in
its stored form later. Results therefore do not depend on the number of drafted tokens, even with
int8 rows.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.layers import DenseLayer, Resident, Sliding
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.compiler_options import layer_options
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Weights
from infinigen_jax.models import Params
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill.attention import attention_mass
from infinigen_jax.prefill.compiled import Hosted, device_rows, embed, host_rows, layer_over
from infinigen_jax.prefill.narrow_attention import Seen, attend_narrow
from infinigen_jax.prefill.prefill import Look, RowStore, through_layers
from infinigen_jax.prefill.prior_rows import ChunkAttention
from infinigen_jax.transfer.host_weights import await_copy, start_next


class Verified(NamedTuple):
    """Result of the layers over drafted tokens; their rows are not stored yet."""

    x: Float[Array, "b c e"]
    rows: list[Float[Array, "b k c w"]]
    # Queries and log-sums of their softmax, of layers that the policy observes.
    observed: list[tuple[Float[Array, "b c h d"], Float[Array, "b c h"]] | None]


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
    start, embedding = cache.lengths, weights.params["embedding"]
    x = embed(decoder.of_chunks, embedding, tokens, Span(start, start), size=size)
    span, compute = Span(start, jnp.full_like(start, size)), functools.partial(_layer, decoder)
    store = RowStore(decoder, weights, cache)
    layers = list(through_layers(compute, decoder, weights, store, x, look, span))
    _, outputs, rows, observed = map(list, zip(*layers, strict=True))
    return Verified(outputs[-1], rows, observed)


def commit(
    decoder: Decoder,
    weights: Weights,
    cache: Cache,
    verified: Verified,
    accepted: Int[Array, " b"],
) -> Cache:
    """Store the rows of the leading accepted tokens; the cache of `verify` is donated."""
    store = RowStore(decoder, weights, cache)
    span = Span(cache.lengths, accepted)
    for i, (rows, observed) in enumerate(zip(verified.rows, verified.observed, strict=True)):
        if observed is not None:
            mass = _mass(decoder, *observed, rows, *store.hosted(decoder.host_number(i)), span)
            observed = observed[0], mass
        store.keep(i, rows, span, observed)
    return store.cache()._replace(lengths=_advance(decoder, *span))


@compiled(
    lambda at: (at.batch, at.rows, at.batch, at.batch, at.whole),
    layer_options,
    static_argnames=("window", "observed"),
    donate_argnums=1,
)
def _layer(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "b c e"],
    local: DenseLayer | Sliding | Resident,
    hosted: Hosted | None,
    stored: tuple[Params, ...],
    span: Span,
    *,
    window: int | None,
    observed: bool,
) -> tuple[Array, Array, Array | None, Array | None, Any]:
    """Return the results of `read_layer`, but `observed` with the log-sums of the softmax."""
    upcoming, x = start_next(stored, x)
    positions, cap = span.positions(x.shape[1]), decoder.config.attention_softcap
    if isinstance(local, Resident):
        assert hosted is not None
        near = _resident(decoder, local, hosted[2], positions)
        prior = host_rows(decoder, *hosted, span)
        # Rows that only the host has when the next token is computed.
        end = jnp.maximum(span.start - decoder.policy.window + 1, 0)
        prior = prior._replace(start=end, first=decoder.policy.sinks)
    else:
        near, prior = [], device_rows(local, span, decoder.dtype)
    distance = positions[:, None] - positions[:, :, None]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window

    def attend(queries: Array, keys: Array, values: Array) -> ChunkAttention:
        drafted = Seen(keys.swapaxes(1, 2), values.swapaxes(1, 2), visible)
        ahead = not decoder.transfer.in_place
        return attend_narrow(queries, [drafted, *near], prior, positions, window, cap, ahead)

    done = layer_over(decoder.blueprint.layer(params), x, positions, positions + 1, attend)
    upcoming, x = await_copy(upcoming, done.x)
    queries, log_sum = (done.queries, done.attended.log_sum) if observed else (None, None)
    return x, done.rows, queries, log_sum, upcoming


@compiled(lambda at: at.rows, layer_options)
def _mass(
    decoder: Decoder,
    queries: Float[Array, "b c h d"],
    log_sum: Float[Array, "b c h"],
    rows: Float[Array, "b k c w"],
    host: Any,
    number: Int[Array, ""],
    scales: Any,
    span: Span,
) -> Float[Array, "b k t"]:
    """Return the attention that a layer's rows receive from the accepted tokens."""
    keys = rows[..., : decoder.config.head_dim].swapaxes(1, 2)
    prior, cap = host_rows(decoder, host, number, scales, span), decoder.config.attention_softcap
    return attention_mass(queries, keys, log_sum, span, prior, cap)


@compiled(lambda at: at.batch)
def _advance(
    decoder: Decoder, start: Int[Array, " b"], accepted: Int[Array, " b"]
) -> Int[Array, " b"]:
    return start + accepted


def _resident(
    decoder: Decoder, local: Resident, scales: Any, positions: Int[Array, "b c"]
) -> list[Seen]:
    """Return sinks and recent rows: exact in a token's window, else as stored."""
    sinks, window, stored = decoder.policy.sinks, decoder.policy.window, decoder.row_format
    start = positions[:, 0]
    places = decoder.slots.positions(start - 1)[:, :, None]
    kept = places < sinks
    # The oldest row of the ring has left it when the next token is computed.
    valid = (places >= 0) & (kept | (places > start[:, None, None] - window))
    if stored.exact:
        return [Seen(local.keys, local.values, valid)]
    recent = kept | (positions[:, None] - places < window)
    old_keys, old_values = jnp.split(
        stored.decode(scales, stored.encode(scales, local.rows)), 2, axis=-1
    )
    exact = Seen(local.keys, local.values, valid & recent)
    return [exact, Seen(old_keys, old_values, valid & ~recent)]
