"""Error of a layer's attention when it reads few rows, measured on the calibration text.

Some layers attend so evenly that no few rows represent all of them: the first two of OPT, at most
the first of LLaMA. A few sentences show it. With the rows of highest weight and the block means of
the others, the hidden state after attention is 4 to 10 % off in those layers, and at most 2 % in
others. `Model.dense_layers` keeps those layers on the device in full. The measurement takes half of
`InfiniGen`'s budget, exact scores and plain block means. It includes neither the error of a partial
index nor the gain of predicted values (`speculation.tail`). Errors at other budgets serve to divide
a budget among the layers (`speculation.layer_budgets`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.models import ModelConfig, Params, blueprint
from infinigen_jax.ops.attention import soft_capped

BUDGETS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4)
BUDGET = 0.05  # decides which layers are dense; one of BUDGETS
BLOCK = 64  # tokens of the tail that share a mean value
SINKS, RECENT = 4, 32
STEPS = 64  # measured positions, spread over the second half of a window
SHORTEST = 320  # tokens of the shortest window that is measured


@functools.partial(jax.jit, static_argnums=0)
def squared_errors(
    config: ModelConfig,
    params: Params,
    hidden: Float[Array, "w s e"],
    queries: Float[Array, "w s h d"],
    guesses: tuple[Float[Array, "w s h d"], ...],
    keys: Float[Array, "w s k d"],
    values: Float[Array, "w s k d"],
    valid: Bool[Array, "w s"],
) -> tuple[Float[Array, " w"], Float[Array, "w n m"]]:
    """Return squared norms of the hidden state after attention, and of its sparse errors.

    Args:
        params: the layer's parameters, float32.
        hidden: input of the layer.
        queries: true queries, scaled and rotated.
        guesses: n - 1 sets of speculated queries, scaled and rotated.

    Returns:
        For each window the squared norm, and the squared error with rows selected by the true
        queries and by each of the guesses, at each of the m BUDGETS. 0 for a window shorter than
        SHORTEST.
    """
    layer, cap = blueprint(config, jnp.float32).layer(params), config.attention_softcap

    def output(o: Float[Array, "n k g d"]) -> Float[Array, "n e"]:
        return layer.attention_output(o.reshape(len(o), config.num_heads, config.head_dim))

    def window(arrays: Any) -> tuple[Float[Array, ""], Float[Array, "n m"]]:
        x, *choosers, key, value, valid_tokens = arrays
        count = jnp.sum(valid_tokens, dtype=jnp.int32)
        at = count - 1 - jnp.arange(STEPS, dtype=jnp.int32) * (count // 2) // STEPS
        at = jnp.maximum(at, 0)
        choosers = tuple(config.grouped(q[at]) for q in choosers)
        exact, *sparse = map(output, _attended(choosers[0], choosers, key, value, at, cap))
        errors = jnp.stack([jnp.sum(jnp.square(o - exact)) for o in sparse])
        norm = jnp.sum(jnp.square(x[at] + exact))
        long = count >= SHORTEST
        errors = jnp.where(long, errors, 0.0).reshape(len(choosers), -1)
        return jnp.where(long, norm, 0.0), errors

    return jax.lax.map(window, (hidden, queries, *guesses, keys, values, valid))


def _attended(
    query: Float[Array, "n k g d"],
    choosers: tuple[Float[Array, "n k g d"], ...],
    keys: Float[Array, "s k d"],
    values: Float[Array, "s k d"],
    at: Int[Array, " n"],
    cap: float | None,
) -> list[Float[Array, "n k g d"]]:
    """Return full attention, then sparse attention for each chooser and each of BUDGETS.

    Sparse attention reads the rows that the chooser selects, and block means of the others.
    """
    place = jnp.arange(len(keys), dtype=jnp.int32)
    distance = at[:, None] - place[None]
    seen = distance >= 0
    far = seen & (place >= SINKS)[None] & (distance >= RECENT)

    def weights(q: Float[Array, "n k g d"], mask: Bool[Array, "n s"]) -> Array:
        scores = soft_capped(jnp.einsum("nkgd,skd->nkgs", q, keys), cap)
        return jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)

    def summed(weight: Float[Array, "n k g s"], values: Float[Array, "s k d"]) -> Array:
        return jnp.einsum("nkgs,skd->nkgd", weight, values)

    weight = weights(query, seen)
    means, by_block = _block_means(values, far)
    outputs = [summed(weight, values)]
    for chooser in choosers:
        rank = jnp.where(far[:, None], jnp.sum(weights(chooser, far), axis=2), -1.0)
        order = jnp.argsort(jnp.argsort(-rank, axis=-1), axis=-1)
        for budget in BUDGETS:
            rows = (at.astype(jnp.float32) * budget).astype(jnp.int32)
            left = far[:, None] & (order >= rows[:, None, None])
            kept = jnp.where(left[:, :, None], 0.0, weight)
            rest = jnp.einsum("nkgs,sm->nkgm", weight - kept, by_block)
            outputs.append(summed(kept, values) + jnp.einsum("nkgm,nmkd->nkgd", rest, means))
    return outputs


def _block_means(
    values: Float[Array, "s k d"], far: Bool[Array, "n s"]
) -> tuple[Float[Array, "n m k d"], Float[Array, "s m"]]:
    """Return the mean value of each block's far tokens, and each token's block, one-hot."""
    blocks = -(-len(values) // BLOCK)
    place = jnp.arange(len(values), dtype=jnp.int32)
    by_block = jax.nn.one_hot(place // BLOCK, blocks, dtype=values.dtype)
    far = far.astype(values.dtype)
    total = jnp.einsum("ns,sm,skd->nmkd", far, by_block, values)
    return total / jnp.maximum(far @ by_block, 1.0)[..., None, None], by_block
