"""Sampling of the next token from logits: greedy, temperature, top-k, top-p.

A row's draw depends only on the seed, the row's number and the step. The engine gives every row the
same number, so a prompt continues the same way alone and in a batch.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer, Key

from infinigen_jax.settings.sampling import Sampling


def row_keys(
    seed: int | Integer[Array, ""],
    rows: Integer[Array, " b"],
    step: int | Integer[Array, ""] | Integer[Array, " b"],
) -> Key[Array, " b"]:
    """Return one random key for each row of a batch.

    Args:
        seed: random seed of the generation.
        rows: number of each row, such as `jnp.arange(b)`. A row keeps its number when the batch
            around it changes.
        step: number of tokens drawn before, one for all rows or one per row; may be traced.
    """
    key = jax.random.key(seed)
    steps = jnp.broadcast_to(jnp.asarray(step), rows.shape)
    return jax.vmap(lambda row, step: jax.random.fold_in(jax.random.fold_in(key, row), step))(
        rows, steps
    )


def sample(
    logits: Float[Array, "b v"], sampling: Sampling, keys: Key[Array, " b"] | None = None
) -> Int[Array, " b"]:
    """Draw one token for each row.

    Args:
        logits: any floating dtype; computed in float32. Among equal logits the lower token id
            counts as more likely.
        sampling: settings, static under jit.
        keys: from `row_keys`; unused when `sampling.greedy`.

    Returns:
        Token ids, int32.

    Raises:
        ValueError: `keys` is missing.
    """
    if sampling.greedy:
        return lax.argmax(logits, 1, jnp.int32)
    if keys is None:
        raise ValueError("sample: keys are needed unless sampling.greedy")
    logits = logits.astype(jnp.float32)
    # With a maximum of 0 the division cannot overflow to +inf.
    logits = (logits - logits.max(axis=1, keepdims=True)) / sampling.temperature
    draw = jax.vmap(jax.random.categorical)
    vocabulary = logits.shape[1]
    count = min(sampling.top_k or vocabulary, vocabulary)
    if count == vocabulary and sampling.top_p == 1:
        return draw(keys, logits).astype(jnp.int32)
    candidates, tokens = lax.top_k(logits, count)
    chosen = draw(keys, _keep_mass(candidates, sampling.top_p))
    return jnp.take_along_axis(tokens, chosen[:, None], axis=1)[:, 0].astype(jnp.int32)


def _keep_mass(logits: Float[Array, "b n"], mass: float) -> Float[Array, "b n"]:
    """Keep the fewest leading logits, of descending ones, whose probabilities sum to `mass`.

    A token stays if those before it do not reach `mass`, so the first one always stays.
    """
    if mass == 1:
        return logits
    probabilities = jax.nn.softmax(logits, axis=1)
    preceding = jnp.cumsum(probabilities, axis=1) - probabilities
    return jnp.where((preceding < mass).at[:, 0].set(True), logits, -jnp.inf)
