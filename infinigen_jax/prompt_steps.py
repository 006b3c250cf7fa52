"""The compiled functions of reading prompts, see `prefill`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt

from infinigen_jax.cache import Cache, DenseLayer, Local, Resident, Sliding
from infinigen_jax.compiler import layer_options
from infinigen_jax.decode import Decoder
from infinigen_jax.memory import Placement
from infinigen_jax.models import Params
from infinigen_jax.pooled import start_kept, start_pool
from infinigen_jax.prompt_layer import chunk_layer, device_rows, host_rows, keep_rows
from infinigen_jax.received import attention_received
from infinigen_jax.sampling import Sampling
from infinigen_jax.span import Span
from infinigen_jax.weights import await_copy, start_next


class PrefillSteps(NamedTuple):
    """The compiled functions of reading; the cache arrays that they replace are donated.

    The layers' last result is what was brought of the next layer's weights, if they were given as
    `stored`, see `weights`.
    """

    empty: Any
    embed: Any
    device_layer: Any
    keep_on_device: Any
    host_layer: Any
    observed_layer: Any
    keep: Any
    last: Any
    pool: Any
    kept: Any
    draw: Any


@functools.lru_cache(maxsize=64)
def prefill_steps(decoder: Decoder) -> PrefillSteps:
    """Jit a decoder's functions for chunks."""
    config, policy, stored = decoder.config, decoder.policy, decoder.row_format

    def empty(batch: int, capacity: int, slots: int) -> Cache:
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
            kind = DenseLayer if ring is None else Sliding
            return kind.empty((batch, k, ring or capacity, d), decoder.kept_dtype)

        return Cache(
            None,
            tuple(() if s else policy.init(config, batch, slots) for s in streams),
            tuple(local(i) for i in range(config.num_layers)),
            jnp.zeros(batch, jnp.int32),
            tuple(stored.no_scales(batch, k) for _ in streams),
            tuple(
                None if s else decoder.empty_hot_set(i, batch, slots) for i, s in enumerate(streams)
            ),
        )

    def embed(params: Params, tokens: Int[Array, "b c"], span: Span) -> Float[Array, "b c e"]:
        # Padding may lie beyond the last position, for which a table would give NaN.
        positions = jnp.minimum(span.positions(tokens.shape[1]), config.max_positions - 1)
        return decoder.blueprint.embedding(params).embed(tokens, positions)

    def device_layer(
        params: Params,
        x: Float[Array, "b c e"],
        local: DenseLayer | Sliding,
        span: Span,
        lengths: Int[Array, " b"],
        window: int | None,
        stored: tuple[Params, ...] = (),
    ) -> tuple[Array, Array, Any]:
        coming, x = start_next(stored, x)
        earlier = device_rows(local, span, decoder.dtype)
        layer = decoder.blueprint.layer(params)
        done = chunk_layer(layer, x, span, lengths, earlier, window)
        coming, x = await_copy(coming, done.x)
        return x, done.rows, coming

    def keep_on_device(
        local: DenseLayer | Sliding, rows: Float[Array, "b k c w"], span: Span
    ) -> DenseLayer | Sliding:
        return local.extend(rows, span)

    def host_layer(
        params: Params,
        x: Float[Array, "b c e"],
        scales: Any,
        host: Shaped[Array, "l a k t w"],
        number: Int[Array, ""],
        span: Span,
        lengths: Int[Array, " b"],
        observed: bool,
        stored: tuple[Params, ...] = (),
    ) -> tuple[Array, Array, Any, Any]:
        coming, x = start_next(stored, x)
        earlier = host_rows(decoder, host, number, scales, span)
        done = chunk_layer(decoder.blueprint.layer(params), x, span, lengths, earlier)
        coming, x = await_copy(coming, done.x)
        if not observed:
            return x, done.rows, None, coming
        log_sum = done.attended.log_sum
        received = attention_received(done.queries, done.keys, log_sum, span, earlier)
        return x, done.rows, (done.queries, received), coming

    def last(
        x: Float[Array, "b c e"], span: Span, before: Float[Array, "b e"]
    ) -> tuple[Float[Array, "b e"], Int[Array, " b"]]:
        """The output for each sequence's last token so far, and the new lengths."""
        place = jnp.maximum(span.count - 1, 0)[:, None, None]
        rows = jnp.take_along_axis(x, place, axis=1)[:, 0]
        return jnp.where(span.count[:, None] > 0, rows, before), span.end

    def draw(
        params: Params,
        x: Float[Array, "b e"],
        seed: UInt[Array, ""],
        step: Int[Array, " b"],
        sampling: Sampling,
    ) -> Int[Array, " b"]:
        return decoder.draw(params, x, seed, step, sampling)

    at: Any = Placement(decoder.mesh)
    options = layer_options(decoder)

    def on_host(observed: bool) -> Any:
        return jax.jit(
            functools.partial(host_layer, observed=observed),
            donate_argnums=1,
            out_shardings=(at.batch, at.rows, (at.batch, at.rows) if observed else None, at.whole),
            compiler_options=options,
        )

    return PrefillSteps(
        empty=jax.jit(
            empty,
            static_argnums=(0, 1, 2),
            out_shardings=Cache(None, at.rows, at.rows, at.batch, at.rows, at.rows),
        ),
        embed=jax.jit(embed, out_shardings=at.batch),
        device_layer=jax.jit(
            device_layer,
            static_argnames="window",
            donate_argnums=1,
            out_shardings=(at.batch, at.rows, at.whole),
            compiler_options=options,
        ),
        keep_on_device=jax.jit(keep_on_device, donate_argnums=0, out_shardings=at.rows),
        host_layer=on_host(observed=False),
        observed_layer=on_host(observed=True),
        keep=jax.jit(
            functools.partial(keep_rows, decoder),
            static_argnames="streams",
            donate_argnums=(3, 4, 5, 6),
            out_shardings=(at.rows, at.rows, at.rows, at.host),
        ),
        last=jax.jit(last, out_shardings=(at.batch, at.batch)),
        pool=jax.jit(
            functools.partial(start_pool, decoder), static_argnums=1, out_shardings=at.rows
        ),
        kept=jax.jit(
            functools.partial(start_kept, decoder), static_argnums=0, out_shardings=at.rows
        ),
        draw=jax.jit(draw, static_argnames="sampling", out_shardings=at.batch),
    )
