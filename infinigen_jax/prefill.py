"""Reading the prompt, one layer at a time: each layer's rows go to where the layer is cached.

Prompts of a batch are padded on the right, to one length s:

    position   0 1 2 3 4 5 ...       a row's own positions, from 0
    row 0      a b c d e f           lengths 6, 4: what lies in the padding reaches only outputs of
    row 1      g h i j . .           the padding, and its cache slots are overwritten or masked

Of a layer on the host the device keeps the policy's state, the sinks and the recent window; its
other rows exist there only while the layer runs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt

from infinigen_jax.attention import causal_attention
from infinigen_jax.cache import Cache, DenseLayer, Local, Resident, Sliding, sums_of_values
from infinigen_jax.decode import Decoder, Weights
from infinigen_jax.memory import Placement, allocate_host, write_layer
from infinigen_jax.models import Params
from infinigen_jax.models.base import Layer
from infinigen_jax.pool import held
from infinigen_jax.pooled import start_kept, start_pool
from infinigen_jax.sampling import Sampling
from infinigen_jax.weights import bring

# Given a stage, its output [b, s, e], and each sequence's first position and number of tokens.
Look = Callable[[int, Array, Array, Array], None]


class PrefillSteps(NamedTuple):
    """The compiled functions of a prefill."""

    embed: Any
    device_layer: Any
    host_layer: Any
    streamed_layer: Any
    hot_set: Any
    pool: Any
    kept: Any
    draw: Any


def prefill(
    decoder: Decoder,
    weights: Weights,
    prompts: Int[Array, "b s"],
    lengths: Int[Array, " b"],
    capacity: int,
    sampling: Sampling,
    seed: UInt[Array, ""],
    slots: int | None = None,
    look: Look | None = None,
) -> tuple[Cache, Int[Array, " b"]]:
    """Process the prompts and draw the first token of each.

    Args:
        prompts: token numbers, padded on the right.
        lengths: of the prompts, at least 1.
        capacity: tokens per sequence that the cache has room for; at least s.
        slots: of the host's cache, for a decoder with a pool; else as many as `capacity`.
        look: called with every stage's output, see `checking.Places`.

    Returns:
        The cache, and the drawn tokens (which are not in the cache yet).
    """
    run = prefill_steps(decoder)
    batch = prompts.shape[0]
    config = decoder.config
    host, pool = None, None
    slots = capacity if slots is None else slots
    if decoder.host_layers:
        stored = decoder.row_format
        shape = (decoder.host_layers, batch, config.num_kv_heads, slots, stored.width)
        host = allocate_host(shape, stored.storage, decoder.mesh)
        if decoder.pool is not None:
            pool = run.pool(lengths, prompts.shape[1], slots)
    embedding = weights.params["embedding"]
    look = look or (lambda stage, x, start, count: None)
    x = run.embed(embedding, prompts)
    none = jnp.zeros_like(lengths)
    look(0, x, none, lengths)
    local: list[Local] = []
    states: list[Any] = []
    scales: list[Any] = []
    for i, params in enumerate(weights.params["layers"]):
        if decoder.weights_on_host:
            params, x = bring(decoder.mesh)(params, x)
        number = decoder.host_number(i)
        if number < 0:
            ring = decoder.ring_size(i, capacity)
            x, layer = run.device_layer(params, x, lengths, capacity=capacity, ring=ring)
        else:
            run_layer = run.streamed_layer if decoder.streams(number) else run.host_layer
            x, layer, state, fitted, host = run_layer(
                params, weights.policy[number], x, lengths, host, jnp.int32(number), pool
            )
            states.append(state)
            scales.append(fitted)
        local.append(layer)
        look(i + 1, x, none, lengths)
    tokens = run.draw(embedding, x, lengths, seed, sampling)
    hot = tuple(
        None
        if decoder.streams(number)
        else run.hot_set(batch, capacity)
        if pool is None
        else run.kept(pool)
        for number in range(decoder.host_layers)
    )
    pools = () if pool is None else tuple(pool.copy() for _ in hot)
    return Cache(host, tuple(states), tuple(local), lengths, tuple(scales), hot, pools), tokens


@functools.lru_cache(maxsize=64)
def prefill_steps(decoder: Decoder) -> PrefillSteps:
    """Jit a decoder's prefill functions."""

    def embed(params: Params, tokens: Int[Array, "b s"]) -> Float[Array, "b s e"]:
        return decoder.blueprint.embedding(params).embed(tokens, _positions(tokens))

    def device_layer(
        params: Params,
        x: Float[Array, "b s e"],
        lengths: Int[Array, " b"],
        capacity: int,
        ring: int | None,
    ) -> tuple:
        layer = decoder.blueprint.layer(params)
        x, keys, values = prompt_layer(layer, x, lengths, ring)
        if ring is not None:
            return x, Sliding.from_prompt(keys, values, lengths, ring)
        return x, DenseLayer.from_prompt(keys, values, capacity)

    def host_layer(
        params: Params,
        policy_weights: Params,
        x: Float[Array, "b s e"],
        lengths: Int[Array, " b"],
        host: Shaped[Array, "l b k t w"],
        number: Int[Array, ""],
        pool: Int[Array, "b k t"] | None = None,
        *,
        streams: bool,
    ) -> tuple:
        layer = decoder.blueprint.layer(params)
        x, keys, values, queries = prompt_layer_queries(layer, x, lengths)
        rows = jnp.concatenate([keys, values], axis=-1).swapaxes(1, 2)
        resident, state, scales, host = keep_rows(
            decoder, policy_weights, rows, lengths, host, number, streams, pool
        )
        if decoder.policy.observes and not streams:
            state = decoder.policy.observe_queries(state, queries, keys, lengths)
        return x, resident, state, scales, host

    def draw(
        params: Params,
        x: Float[Array, "b s e"],
        lengths: Int[Array, " b"],
        seed: UInt[Array, ""],
        sampling: Sampling,
    ) -> Int[Array, " b"]:
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
        return decoder.draw(params, last, seed, jnp.zeros_like(lengths), sampling)

    at = Placement(decoder.mesh)

    def on_host(streams: bool) -> Any:
        return jax.jit(
            functools.partial(host_layer, streams=streams),
            donate_argnums=(2, 4),
            out_shardings=(at.batch, at.rows, at.rows, at.rows, at.host),
        )

    return PrefillSteps(
        embed=jax.jit(embed, out_shardings=at.batch),
        device_layer=jax.jit(
            device_layer,
            static_argnames=("capacity", "ring"),
            donate_argnums=1,
            out_shardings=(at.batch, at.rows),
        ),
        host_layer=on_host(streams=False),
        streamed_layer=on_host(streams=True),
        hot_set=jax.jit(decoder.empty_hot_set, static_argnums=(0, 1), out_shardings=at.rows),
        pool=jax.jit(
            functools.partial(start_pool, decoder), static_argnums=(1, 2), out_shardings=at.rows
        ),
        kept=jax.jit(functools.partial(start_kept, decoder), out_shardings=at.rows),
        draw=jax.jit(draw, static_argnames="sampling", out_shardings=at.batch),
    )


def keep_rows(
    decoder: Decoder,
    policy_weights: Params,
    rows: Float[Array, "b k s w"],
    lengths: Int[Array, " b"],
    host: Shaped[Array, "l b k t w2"],
    number: Int[Array, ""],
    streams: bool,
    pool: Int[Array, "b k t"] | None = None,
) -> tuple[Resident, Any, Any, Shaped[Array, "l b k t w2"]]:
    """What is kept of a prompt's rows by a layer on the host.

    Args:
        rows: keys and values side by side, in the model's dtype.
        number: of the layer, among those on the host.
        streams: nothing is selected for it.
        pool: positions of the rows that its slots are to hold, in place of slot = position.

    Returns:
        The rows on the device, the policy's state, the scales of the stored rows, the host cache.
    """
    policy, config, stored = decoder.policy, decoder.config, decoder.row_format
    sums = policy.has_tail and not streams
    blocks = decoder.slots.blocks(host.shape[3]) if sums and pool is None else 0
    resident = Resident.from_prompt(rows, lengths, decoder.slots, blocks)
    scales = stored.fit(rows, lengths)
    if pool is not None:
        pool = pool[:, :, : rows.shape[2]]
        rows = jnp.take_along_axis(rows, jnp.maximum(pool, 0)[..., None], axis=2)
        if sums:
            there = held(pool, lengths - 1, policy.window) >= 0
            resident = resident._replace(left=sums_of_values(rows, there))
    state: Any = ()
    if not streams:
        state = policy.init(config, rows.shape[0], host.shape[3])
        state = policy.observe_prefill(policy_weights, state, rows[..., : config.head_dim])
    host = write_layer(host, number, stored.encode(scales, rows), decoder.mesh)
    return resident, state, scales, host


def prompt_layer(
    layer: Layer,
    x: Float[Array, "b s e"],
    lengths: Int[Array, " b"] | None = None,
    window: int | None = None,
) -> tuple[Float[Array, "b s e"], Float[Array, "b s k d"], Float[Array, "b s k d"]]:
    """One layer over whole prompts: its output, keys and values.

    Args:
        lengths: of the prompts; s by default.
        window: how many tokens a token attends to, if not all before it.
    """
    x, keys, values, _ = prompt_layer_queries(layer, x, lengths, window)
    return x, keys, values


def prompt_layer_queries(
    layer: Layer,
    x: Float[Array, "b s e"],
    lengths: Int[Array, " b"] | None = None,
    window: int | None = None,
) -> tuple[Array, ...]:
    """As `prompt_layer`, and the queries [b, s, h, d], scaled and rotated."""
    positions = _positions(x[..., 0])
    whole = jnp.full_like(positions, x.shape[1]) if lengths is None else lengths[:, None]
    whole = jnp.broadcast_to(whole, positions.shape)
    a = layer.attention_input(x)
    keys, values = layer.key_value(a, positions, whole)
    queries = layer.query(a, positions, whole)
    attended = causal_attention(queries, keys, values, window=window)
    x = x + layer.attention_output(attended)
    return x + layer.mlp(x), keys, values, queries


def _positions(tokens: Array) -> Int[Array, "b s"]:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
