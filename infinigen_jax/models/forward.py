"""Causal pass over whole sequences in plain JAX: reference for parity, and calibration."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from infinigen_jax.models.base import Blueprint, Params
from infinigen_jax.ops.attention import soft_capped


def forward(
    blueprint: Blueprint, params: Params, tokens: Int[Array, "b s"]
) -> Float[Array, "b s v"]:
    """Return the logits of every position, without a cache. Positions start at 0; no padding.

    Returns:
        Logits, float32.
    """
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
        x = x + layer.attention_output(o)
        x = x + layer.mlp(x)
    return embedding.logits(x)


def causal_attention(
    queries: Float[Array, "s h d"],
    keys: Float[Array, "s k d"],
    values: Float[Array, "s k d"],
    block: int = 256,
    window: int | None = None,
    sinks: int = 0,
    cap: float | None = None,
) -> Float[Array, "s h d"]:
    """Compute causal attention of one sequence in blocks of queries, which keeps scores small.

    Args:
        queries: scaled queries; query head h reads KV head h // (h / k).
        block: queries per step; the temporary is [h, block, s] float32.
        window: number of tokens, itself included, that a token attends to; None for all.
        sinks: number of first tokens that every token also attends to.
        cap: bound of the scores, see `ops.attention.soft_capped`.
    """
    length, heads, size = queries.shape
    kv_heads = keys.shape[1]
    blocks = -(-length // block) if length > block else 1
    block = min(block, length)
    padded = jnp.pad(queries, ((0, blocks * block - length), (0, 0), (0, 0)))
    grouped = padded.reshape(blocks, block, kv_heads, heads // kv_heads, size)
    positions = jnp.arange(blocks * block).reshape(blocks, block)

    def attend(queries_and_positions: tuple[Array, Array]) -> Array:
        q, position = queries_and_positions
        scores = jnp.einsum("skgd,tkd->kgst", q, keys, preferred_element_type=jnp.float32)
        scores = soft_capped(scores, cap)
        place = jnp.arange(length)[None, None, None, :]
        distance = position[None, None, :, None] - place
        visible = distance >= 0
        if window is not None:
            visible &= (distance < window) | (place < sinks)
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return jnp.einsum("kgst,tkd->skgd", weights.astype(values.dtype), values)

    attended = jax.lax.map(attend, (grouped, positions))
    return attended.reshape(blocks * block, heads, size)[:length]
