"""Compiled functions of prefill, see `prefill.prefill`."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import Placement
from infinigen_jax.cache.layers import DenseLayer, Local, Resident, Sliding
from infinigen_jax.cache.pool import Kept, first_used, of_prompt
from infinigen_jax.decode.compiler_options import chunk_options
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.models import Params
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill.attention_mass import attention_mass
from infinigen_jax.prefill.layer import chunk_layer, device_rows, host_rows, keep_rows
from infinigen_jax.programs.program import Program
from infinigen_jax.transfer.host_weights import await_copy, start_next


class CacheSteps(NamedTuple):
    """Compiled functions of prefill that depend on the policy; they donate what they replace.

    `pool` gives the positions of a layer's pooled prompt rows, and `kept` the initial `Kept`.
    """

    empty: Any
    keep: Any
    pool: Any
    kept: Any


class ChunkSteps(NamedTuple):
    """Compiled functions of the layers over a chunk, equal for all policies.

    The last result of a layer's function is the next layer's weights on the device, if they were
    passed in host memory as `stored` (see `transfer.host_weights`); else None. `observed_layer` is
    `host_layer` with queries and received attention, for a policy that observes. `last` takes the
    output of each sequence's last token.
    """

    embed: Any
    device_layer: Any
    keep_on_device: Any
    host_layer: Any
    observed_layer: Any
    last: Any


@functools.lru_cache(maxsize=64)
def cache_steps(decoder: Decoder) -> CacheSteps:
    """Return a decoder's compiled functions for its cache."""
    config, policy, stored = decoder.config, decoder.policy, decoder.row_format

    def empty(*, batch: int, capacity: int, slots: int) -> Cache:
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

    def pool(lengths: Int[Array, " b"], *, slots: int) -> Int[Array, "b k t"]:
        assert decoder.pool is not None
        return of_prompt(decoder.pool, lengths, config.num_kv_heads, slots, policy.sinks)

    def kept(positions: Int[Array, "b k t"]) -> Kept:
        assert decoder.pool is not None
        used = first_used(decoder.pool, positions)
        return Kept(used, decoder.empty_hot_set(positions.shape[0], positions.shape[2]))

    at: Any = Placement(decoder.mesh)
    return CacheSteps(
        empty=Program(
            empty,
            decoder,
            Cache(None, at.rows, at.rows, at.batch, at.rows, at.rows),
            static_argnames=("batch", "capacity", "slots"),
        ),
        keep=Program(
            functools.partial(keep_rows, decoder),
            decoder,
            (at.rows, at.rows, at.rows, at.host),
            static_argnames="streams",
            donate_argnums=(3, 4, 5, 6),
        ),
        pool=Program(pool, decoder, at.rows, static_argnames="slots"),
        kept=Program(kept, decoder, at.rows),
    )


@functools.lru_cache(maxsize=64)
def chunk_steps(decoder: Decoder) -> ChunkSteps:
    """Return the compiled functions for a chunk, given a decoder's `of_chunks`."""
    config, cap = decoder.config, decoder.config.attention_softcap

    def embed(params: Params, tokens: Int[Array, "b c"], span: Span) -> Float[Array, "b c e"]:
        # Padding may lie beyond the last position, where an embedding table would give NaN.
        positions = jnp.minimum(span.positions(tokens.shape[1]), config.max_positions - 1)
        return decoder.blueprint.embedding(params).embed(tokens, positions)

    def device_layer(
        params: Params,
        x: Float[Array, "b c e"],
        local: DenseLayer | Sliding,
        span: Span,
        lengths: Int[Array, " b"],
        stored: tuple[Params, ...] = (),
        *,
        window: int | None,
    ) -> tuple[Array, Array, Any]:
        upcoming, x = start_next(stored, x)
        prior = device_rows(local, span, decoder.dtype)
        layer = decoder.blueprint.layer(params)
        result = chunk_layer(layer, x, span, lengths, prior, window, cap)
        upcoming, x = await_copy(upcoming, result.x)
        return x, result.rows, upcoming

    def host_layer(
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
    ) -> tuple[Array, Array, Any, Any]:
        upcoming, x = start_next(stored, x)
        prior = host_rows(decoder, host, number, scales, span)
        layer = decoder.blueprint.layer(params)
        result = chunk_layer(layer, x, span, lengths, prior, cap=cap)
        upcoming, x = await_copy(upcoming, result.x)
        if not observed:
            return x, result.rows, None, upcoming
        log_sum = result.attended.log_sum
        mass = attention_mass(result.queries, result.keys, log_sum, span, prior, cap)
        return x, result.rows, (result.queries, mass), upcoming

    def last(
        x: Float[Array, "b c e"], span: Span, before: Float[Array, "b e"]
    ) -> tuple[Float[Array, "b e"], Int[Array, " b"]]:
        """Return the output of each sequence's last token so far, and the new lengths."""
        place = jnp.maximum(span.count - 1, 0)[:, None, None]
        rows = jnp.take_along_axis(x, place, axis=1)[:, 0]
        return jnp.where(span.count[:, None] > 0, rows, before), span.end

    def extend(local: DenseLayer | Sliding, rows: Array, span: Span) -> DenseLayer | Sliding:
        return local.extend(rows, span)

    at: Any = Placement(decoder.mesh)
    options = chunk_options(decoder)

    def on_host(observed: bool) -> Program:
        observations = (at.batch, at.rows) if observed else None
        return Program(
            functools.partial(host_layer, observed=observed),
            decoder,
            (at.batch, at.rows, observations, at.whole),
            donate_argnums=1,
            compiler_options=options,
        )

    return ChunkSteps(
        embed=Program(embed, decoder, at.batch),
        device_layer=Program(
            device_layer,
            decoder,
            (at.batch, at.rows, at.whole),
            static_argnames="window",
            donate_argnums=1,
            compiler_options=options,
        ),
        keep_on_device=Program(extend, decoder, at.rows, donate_argnums=0),
        host_layer=on_host(observed=False),
        observed_layer=on_host(observed=True),
        last=Program(last, decoder, (at.batch, at.batch)),
    )
