"""Causal pass over whole sequences in plain JAX: reference for parity, and calibration."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from infinigen_jax.models.base import Blueprint, Params
from infinigen_jax.ops.attention import soft_capped

BLOCK = 64


def forward(
    blueprint: Blueprint, params: Params, tokens: Int[Array, "b s"]
) -> Float[Array, "b s v"]:
    """Return float32 logits of every position, without a cache or padding; positions start at 0."""
    config, embedding = blueprint.config, blueprint.embedding(params["embedding"])
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    lengths = jnp.full_like(positions, tokens.shape[1])
    x = embedding.embed(tokens, positions)
    for i, layer_params in enumerate(params["layers"]):
        layer = blueprint.layer(layer_params)
        a = layer.attention_input(x)
        keys, values = layer.key_value(a, positions, lengths)
        attend = functools.partial(
            causal_attention, window=config.window_of(i), cap=config.attention_softcap
        )
        o = jax.vmap(attend)(layer.query(a, positions, lengths), keys, values)
        x = x + layer.attention_output(o, a)
        x = layer.after_mlp(x, a)
    return embedding.logits(x)


def causal_attention(
    queries: Float[Array, "s h d"],
    keys: Float[Array, "s k d"],
    values: Float[Array, "s k d"],
    window: int | None = None,
    sinks: int = 0,
    cap: float | None = None,
) -> Float[Array, "s h d"]:
    """Compute causal attention of one sequence, by KV head and in blocks of queries.

    Scores of a block of BLOCK queries, [h / k, block, s] float32, stay in a processor's cache.

    Args:
        queries: scaled queries; query head h reads KV head h // (h / k).
        window: number of tokens, itself included, that a token attends to; None for all.
        sinks: number of first tokens that every token also attends to.
    """
    length, heads, size = queries.shape
    block = min(BLOCK, length)
    blocks = -(-length // block)
    padded = jnp.pad(queries, ((0, blocks * block - length), (0, 0), (0, 0)))
    tiles = padded.reshape(blocks, block, keys.shape[1], -1, size).transpose(2, 0, 3, 1, 4)
    positions = jnp.arange(blocks * block).reshape(blocks, block)
    span = length if window is None else min(length, block + window - 1)
    is_sink = jnp.arange(sinks + span) < sinks

    def attend_head(arrays: tuple[Array, Array, Array]) -> Array:
        tiles, keys, values = arrays

        def attend(tile_and_positions: tuple[Array, Array]) -> Array:
            q, position = tile_and_positions
            near_keys, near_values, place = keys, values, jnp.arange(length)
            if window is not None:
                first = jnp.clip(position[0] - window + 1, 0, length - span)
                place = jnp.concatenate([jnp.arange(sinks), first + jnp.arange(span)])
                near_keys, near_values = keys[place], values[place]
            scores = jnp.einsum("gsd,td->gst", q, near_keys, preferred_element_type=jnp.float32)
            scores = soft_capped(scores, cap)
            distance = position[:, None] - place[None]
            visible = distance >= 0
            if window is not None:
                visible &= (distance < window) != is_sink[None]
            weights = jax.nn.softmax(jnp.where(visible[None], scores, -jnp.inf), axis=-1)
            return jnp.einsum("gst,td->gsd", weights.astype(values.dtype), near_values)

        return jax.lax.map(attend, (tiles, positions))

    by_head = (tiles, keys.swapaxes(0, 1), values.swapaxes(0, 1))
    attended = jax.lax.map(attend_head, by_head).transpose(1, 3, 0, 2, 4)
    return attended.reshape(blocks * block, heads, size)[:length]
