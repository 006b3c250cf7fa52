"""What InfiniGen lives on, measured in a model.

- outlier channels: few coordinates of the residual that are far larger than the others, which
  make it change little from layer to layer (the paper's section 4.1);
- the cosine similarity of consecutive layers' attention inputs, which is what speculation a layer
  ahead relies on;
- how much of the attention lies on how few tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.models import Blueprint, Params
from infinigen_jax.prompt_attention import causal_attention

SHARES = (0.01, 0.05, 0.1)
QUERIES = 64  # of a window, evenly spread over its second half
OUTLIER = 6.0  # times the median channel


def layer_statistics(
    plan: Blueprint, params: Params, tokens: Int[np.ndarray, "w s"]
) -> list[dict[str, Any]]:
    """Statistics of every layer, means over windows (one is run at a time)."""

    @jax.jit
    def start(embedding: Params, tokens: Int[Array, "b s"]) -> Float[Array, "b s e"]:
        return plan.embedding(embedding).embed(tokens, _positions(tokens))

    @jax.jit
    def run(layer_params: Params, x: Float[Array, "b s e"]) -> tuple[Array, ...]:
        layer, positions = plan.layer(layer_params), _positions(x[..., 0])
        a = layer.attention_input(x)
        keys, values = layer.key_value(a, positions)
        queries = layer.query(a, positions)
        mass = _concentration(queries, keys)
        x_next = x + layer.attention_output(causal_attention(queries, keys, values))
        return x_next + layer.mlp(x_next), a, jnp.mean(x * x, axis=(0, 1)), mass

    similar = jax.jit(_similarity)
    rows: list[list[dict[str, Any]]] = []
    for window in tokens:
        x = start(params["embedding"], jnp.asarray(window)[None])
        before: tuple[Array, Array] | None = None
        rows.append([])
        for layer_params in params["layers"]:
            x_next, a, squares, mass = run(layer_params, x)
            row: dict[str, Any] = {"squares": np.asarray(squares), "mass": np.asarray(mass)}
            if before is not None:
                row["residual"] = float(similar(before[0], x))
                row["input"] = float(similar(before[1], a))
            rows[-1].append(row)
            before, x = (x, a), x_next
    return [_summary(i, [window[i] for window in rows]) for i in range(len(params["layers"]))]


def _summary(layer: int, windows: list[dict[str, Any]]) -> dict[str, Any]:
    size = np.sqrt(np.mean([w["squares"] for w in windows], axis=0))  # rms of each channel
    ratio = size / np.median(size)
    mass = np.mean([w["mass"] for w in windows], axis=0)  # [shares, h]
    return {
        "layer": layer,
        "largest_channel": float(ratio.max()),
        "outlier_channels": int((ratio > OUTLIER).sum()),
        "energy_of_top_1_percent": _top_energy(size),
        "residual_similarity": _mean(windows, "residual"),
        "input_similarity": _mean(windows, "input"),
        "mass": {f"{share:.0%}": float(m.mean()) for share, m in zip(SHARES, mass, strict=True)},
        "mass_by_head": {
            f"{share:.0%}": [round(float(x), 4) for x in m]
            for share, m in zip(SHARES, mass, strict=True)
        },
    }


def _top_energy(size: np.ndarray) -> float:
    energy = np.sort(size**2)[::-1]
    return float(energy[: max(1, round(len(energy) / 100))].sum() / energy.sum())


def _mean(windows: list[dict[str, Any]], name: str) -> float | None:
    values = [w[name] for w in windows if name in w]
    return float(np.mean(values)) if values else None


def _concentration(
    queries: Float[Array, "b s h d"], keys: Float[Array, "b s k d"]
) -> Float[Array, "n h"]:
    """Share of the attention on the most attended tokens, for each of SHARES and each head."""
    s, h, d = queries.shape[1:]
    k = keys.shape[2]
    at = np.linspace(s // 2, s - 1, min(QUERIES, s - s // 2)).astype(int)
    grouped = queries[:, at].reshape(-1, len(at), k, h // k, d)
    scores = jnp.einsum("bqkgd,bnkd->bkgqn", grouped, keys, preferred_element_type=jnp.float32)
    visible = jnp.arange(s)[None] <= jnp.asarray(at)[:, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    summed = jnp.cumsum(-jnp.sort(-weights, axis=-1), axis=-1)  # [b k g q n]
    parts = []
    for share in SHARES:
        last = np.maximum(np.round((at + 1) * share).astype(int), 1) - 1
        index = jnp.broadcast_to(jnp.asarray(last)[:, None], (*summed.shape[:4], 1))
        there = jnp.take_along_axis(summed, index, axis=-1)[..., 0]
        parts.append(jnp.mean(there, axis=(0, 3)).reshape(h))
    return jnp.stack(parts)


def _similarity(x: Float[Array, "b s e"], y: Float[Array, "b s e"]) -> Float[Array, ""]:
    """Mean over tokens of the cosine similarity."""
    norms = jnp.linalg.norm(x, axis=-1) * jnp.linalg.norm(y, axis=-1)
    return jnp.mean(jnp.sum(x * y, axis=-1) / jnp.maximum(norms, 1e-30))


def _positions(tokens: Array) -> Int[Array, "b s"]:
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
