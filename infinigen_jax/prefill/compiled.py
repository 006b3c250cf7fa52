"""Compiled functions of prefill, see `prefill.prefill`.

Those of the cache, up to `kept`, depend on the policy, and donate what they replace. Those of a
chunk, from `embed` on, are equal for all policies: call them with a decoder's `of_chunks`.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.layers import DenseLayer, Local, Resident, Sliding
from infinigen_jax.cache.pool import Kept, first_used, of_prompt
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.compiler_options import chunk_options
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.models import Params
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill.attention_mass import attention_mass
from infinigen_jax.prefill.layer import chunk_layer, device_rows, host_rows, keep_rows
from infinigen_jax.transfer.host_weights import await_copy, start_copy, start_next


@compiled(
    lambda at: Cache(None, at.rows, at.rows, at.batch, at.rows, at.rows),
    static_argnames=("batch", "capacity", "slots"),
)
def empty(decoder: Decoder, *, batch: int, capacity: int, slots: int) -> Cache:
    """Return a cache without tokens and without host array."""
    config, policy, stored = decoder.config, decoder.policy, decoder.row_format
    k, d = config.num_kv_heads, config.head_dim
    streams = [decoder.streams(i) for i in range(decoder.host_layers)]

    def local(layer: int) -> Local:
        number, ring = decoder.host_number(layer), decoder.ring_size(layer, capacity)
        if number >= 0:
            sums = policy.has_tail and not streams[number]
            blocks = 0
            if sums:
                blocks = 1 if decoder.pool is not None else decoder.slots.blocks(slots)
            return Resident.empty(batch, k, 2 * d, decoder.slots, decoder.dtype, blocks)
        kind, shape = DenseLayer if ring is None else Sliding, (batch, k, ring or capacity, d)
        return kind(*(jnp.zeros(shape, decoder.kept_dtype) for _ in range(2)))

    return Cache(
        None,
        tuple(() if s else policy.init(config, batch, slots) for s in streams),
        tuple(local(i) for i in range(config.num_layers)),
        jnp.zeros(batch, jnp.int32),
        tuple(stored.no_scales(batch, k) for _ in streams),
        tuple(None if s else decoder.empty_hot_set(batch, slots) for s in streams),
    )


keep = compiled(
    lambda at: (at.rows, at.rows, at.rows, at.host),
    static_argnames="streams",
    donate_argnums=(3, 4, 5, 6),
)(keep_rows)


@compiled(lambda at: at.rows, static_argnames="slots")
def pool(decoder: Decoder, lengths: Int[Array, " b"], *, slots: int) -> Int[Array, "b k t"]:
    """Return the positions of a layer's pooled prompt rows."""
    assert decoder.pool is not None
    heads, sinks = decoder.config.num_kv_heads, decoder.policy.sinks
    return of_prompt(decoder.pool, lengths, heads, slots, sinks)


@compiled(lambda at: at.rows)
def kept(decoder: Decoder, positions: Int[Array, "b k t"]) -> Kept:
    """Return what a pool's layer begins with, given the positions of its rows."""
    assert decoder.pool is not None
    used = first_used(decoder.pool, positions)
    return Kept(used, decoder.empty_hot_set(positions.shape[0], positions.shape[2]))


@compiled(lambda at: at.batch, static_argnames="size")
def embed(
    decoder: Decoder, params: Params, tokens: Int[Array, "b n"], span: Span, *, size: int
) -> Float[Array, "b c e"]:
    """Return the input of the layers for the first `size` tokens; negative ones are padding."""
    tokens = jnp.maximum(tokens[:, :size], 0)
    # Padding may lie beyond the last position, where an embedding table would give NaN.
    last = decoder.config.max_positions - 1
    positions = jnp.minimum(span.positions(size), last)
    return decoder.blueprint.embedding(params).embed(tokens, positions)


@compiled(lambda at: (at.whole, at.batch), donate_argnums=1)
def bring(
    decoder: Decoder, params: Any, x: Float[Array, "b c e"]
) -> tuple[Any, Float[Array, "b c e"]]:
    """Copy a layer's host parameters to the device, after the computation of x."""
    return await_copy(*start_copy(params, x))


@compiled(
    lambda at: (at.batch, at.rows, at.whole),
    chunk_options,
    static_argnames="window",
    donate_argnums=1,
)
def device_layer(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "b c e"],
    local: DenseLayer | Sliding,
    span: Span,
    lengths: Int[Array, " b"],
    stored: tuple[Params, ...] = (),
    *,
    window: int | None,
) -> tuple[Array, Array, Any]:
    """Return a layer's output and its rows.

    The last result is the next layer's weights on the device, if they were passed in host memory as
    `stored` (see `transfer.host_weights`); else None.
    """
    upcoming, x = start_next(stored, x)
    prior = device_rows(local, span, decoder.dtype)
    layer = decoder.blueprint.layer(params)
    result = chunk_layer(layer, x, span, lengths, prior, window, decoder.config.attention_softcap)
    upcoming, x = await_copy(upcoming, result.x)
    return x, result.rows, upcoming


@compiled(lambda at: at.rows, donate_argnums=0)
def keep_on_device(
    decoder: Decoder, local: DenseLayer | Sliding, rows: Array, span: Span
) -> DenseLayer | Sliding:
    return local.extend(rows, span)


@compiled(
    lambda at: (at.batch, at.rows, at.batch, at.rows, at.whole),
    chunk_options,
    static_argnames="observed",
    donate_argnums=1,
)
def host_layer(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "b c e"],
    scales: Any,
    host: Shaped[Array, "l a k t w"],
    number: Int[Array, ""],
    span: Span,
    lengths: Int[Array, " b"],
    stored: tuple[Params, ...] = (),
    *,
    observed: bool,
) -> tuple[Array, Array, Array | None, Array | None, Any]:
    """Return `device_layer`'s results, and with `observed` also queries and received attention."""
    upcoming, x = start_next(stored, x)
    prior, cap = host_rows(decoder, host, number, scales, span), decoder.config.attention_softcap
    layer = decoder.blueprint.layer(params)
    result = chunk_layer(layer, x, span, lengths, prior, cap=cap)
    upcoming, x = await_copy(upcoming, result.x)
    if not observed:
        return x, result.rows, None, None, upcoming
    log_sum = result.attended.log_sum
    mass = attention_mass(result.queries, result.keys, log_sum, span, prior, cap)
    return x, result.rows, result.queries, mass, upcoming


@compiled(lambda at: (at.batch, at.batch))
def last_outputs(
    decoder: Decoder, x: Float[Array, "b c e"], span: Span, before: Float[Array, "b e"]
) -> tuple[Float[Array, "b e"], Int[Array, " b"]]:
    """Return the output of each sequence's last token so far, and the new lengths."""
    place = jnp.maximum(span.count - 1, 0)[:, None, None]
    rows = jnp.take_along_axis(x, place, axis=1)[:, 0]
    return jnp.where(span.count[:, None] > 0, rows, before), span.end
