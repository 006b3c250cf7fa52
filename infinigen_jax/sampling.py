"""Sampling of the next token from logits, with separate settings for each sequence of a batch.

Settings are arrays, so that changing them compiles nothing. A sequence's draw depends only on its
logits, settings, stream and step, not on the rest of the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from infinigen_jax.settings.sampling import GREEDY_BELOW, Sampling

BLOCK = 256  # tokens whose probabilities are summed first when drawing


class SamplingArrays(NamedTuple):
    """Sampling settings of each sequence as arrays, from `settings_of`; see `Sampling`."""

    temperature: Float[Array, " b"]
    top_k: Int[Array, " b"]
    top_p: Float[Array, " b"]
    min_p: Float[Array, " b"]
    repetition_penalty: Float[Array, " b"]
    presence_penalty: Float[Array, " b"]
    frequency_penalty: Float[Array, " b"]
    seed: UInt32[Array, " b"]


class History(NamedTuple):
    """Earlier tokens of each sequence, for penalties."""

    prompt: Bool[Array, "b v"]
    drawn: Int[Array, "b v"]


class LogProbs(NamedTuple):
    """Natural log-probabilities before penalties and temperature; `top` is in descending order."""

    drawn: Float[Array, " b"]
    top: Float[Array, "b n"]
    tokens: Int[Array, "b n"]


def settings_of(sequences: Sequence[Sampling]) -> SamplingArrays:
    """Return the settings of sequences as NumPy arrays."""
    kinds = {"top_k": np.int32, "seed": np.uint32}
    arrays: Any = (
        np.array([getattr(each, name) for each in sequences], kinds.get(name, np.float32))
        for name in SamplingArrays._fields
    )
    return SamplingArrays(*arrays)


def uniforms(
    seed: UInt32[Array, " b"], stream: Int[Array, " b"], step: Int[Array, " b"]
) -> Float[Array, " b"]:
    """Return each sequence's random number in [0, 1) after `step` tokens.

    `stream` distinguishes equal seeds.
    """

    def one(seed: Array, stream: Array, step: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), stream), step)
        return jax.random.uniform(key)

    return jax.vmap(one)(seed, stream, step)


def sample(
    logits: Float[Array, "b v"],
    settings: SamplingArrays,
    uniform: Float[Array, " b"],
    history: History | None = None,
) -> Int[Array, " b"]:
    """Draw one token id, int32, for each sequence; `history` is None if none has penalties.

    Logits of any dtype are computed in float32. Of equal logits, the lower token id ranks first.
    """
    logits = logits.astype(jnp.float32)
    if history is not None:
        logits = penalised(logits, settings, history)
    # With a maximum of 0 the division cannot overflow to +inf.
    best = lax.argmax(logits, 1, jnp.int32)
    scaled = logits - jnp.take_along_axis(logits, best[:, None], axis=1)
    scaled /= jnp.maximum(settings.temperature, GREEDY_BELOW)[:, None]
    scaled = jnp.pad(scaled, ((0, 0), (0, -scaled.shape[1] % BLOCK)), constant_values=-jnp.inf)
    weights = jnp.where(candidates(scaled, settings), jnp.exp(scaled), 0)
    drawn = _locate(weights, lambda total: uniform * total)
    return jnp.where((settings.temperature < GREEDY_BELOW) | (drawn < 0), best, drawn)


def limited(
    logits: Float[Array, "b v"], best: Int[Array, " b"], allowed: Int[Array, "b w"]
) -> tuple[Float[Array, "b v"], Int[Array, " b"]]:
    """Return logits with -inf for the tokens that are not allowed, and the most likely tokens.

    `allowed` has 32 tokens in each int32, the first one in its lowest bit. A sequence that
    may draw every token keeps its `best`.
    """
    bits = allowed[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None]
    bits = bits.reshape(len(bits), -1)[:, : logits.shape[1]] & 1
    logits = jnp.where(bits == 1, logits, -jnp.inf)
    free = jnp.all(allowed == -1, axis=1)
    return logits, jnp.where(free, best, lax.argmax(logits, 1, jnp.int32))


def penalised(
    logits: Float[Array, "b v"], settings: SamplingArrays, history: History
) -> Float[Array, "b v"]:
    """Return the logits with the penalties of earlier tokens."""
    _, _, _, _, repetition, presence, frequency, _ = (x[:, None] for x in settings)
    times = history.drawn.astype(jnp.float32)
    smaller = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(history.prompt | (times > 0), smaller, logits)
    return logits - presence * jnp.minimum(times, 1) - frequency * times


def candidates(scaled: Float[Array, "b v"], settings: SamplingArrays) -> Bool[Array, "b v"]:
    """Return which tokens may be drawn; `scaled` are logits after temperature, at most 0."""
    v = scaled.shape[1]
    count = jnp.where(settings.top_k == 0, v, jnp.minimum(settings.top_k, v))
    probabilities = jnp.exp(scaled)

    def keep(phase: Array, kept: Array) -> Array:
        """Keep the top-k tokens in phase 0 and the top-p tokens in phase 1."""
        weights = jnp.where(kept, jnp.where(phase == 0, 1, probabilities), 0)
        needed = jnp.where(phase == 0, count.astype(jnp.float32), settings.top_p * _sum(weights))
        off = jnp.where(phase == 0, count == v, settings.top_p == 1)
        return kept & leading(scaled, weights, needed, off)

    # A loop, so that the search is compiled once.
    kept = lax.fori_loop(0, 2, keep, scaled > -jnp.inf)
    return kept & (scaled >= jnp.log(settings.min_p)[:, None])


def leading(
    values: Float[Array, "b v"],
    weights: Float[Array, "b v"],
    needed: Float[Array, " b"],
    off: Bool[Array, " b"],
) -> Bool[Array, "b v"]:
    """Mark the fewest largest values whose weights sum to at least `needed`, above 0.

    Values are at most 0, not NaN; of equal ones the first are marked. Weights are at least 0, and
    equal for equal values, unless 0. `off` marks every value of a sequence.
    """
    bits = lax.bitcast_convert_type(values, jnp.int32)
    # Order-preserving integers, on which bisection ends exactly.
    keys = jnp.where(values == 0, 0, bits ^ jnp.int32(0x7FFFFFFF))

    def is_open(low: Array, high: Array) -> Array:
        return (low < high - 1) & ~off

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = _sum(jnp.where(keys >= middle[:, None], weights, 0)) >= needed
        up, down = enough & is_open(low, high), ~enough & is_open(low, high)
        return jnp.where(up, middle, low), jnp.where(down, middle, high)

    lowest = jnp.full_like(keys[:, 0], -(2**31))
    threshold, _ = lax.platform_dependent(
        (lowest, jnp.ones_like(lowest)),
        cpu=lambda bounds: lax.while_loop(lambda x: jnp.any(is_open(*x)), halve, bounds),
        # On a GPU the host waits for the condition of a loop, unless its length is fixed. The range
        # of the keys needs 32 steps.
        default=lambda bounds: lax.fori_loop(0, 32, lambda _, x: halve(x), bounds),
    )
    threshold = threshold[:, None]
    above, ties = keys > threshold, jnp.where(keys == threshold, weights, 0)
    missing = needed - _sum(jnp.where(above, weights, 0))
    # The sum by blocks may be less than what is missing.
    last = _locate(ties, lambda total: jnp.nextafter(jnp.minimum(missing, total), -jnp.inf))
    place = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
    return above | ((ties > 0) & (place <= last[:, None])) | off[:, None]


def _sum(x: Float[Array, "b v"]) -> Float[Array, " b"]:
    # By columns first, which XLA vectorises on a CPU.
    return x.reshape(len(x), -1, BLOCK).sum(axis=1).sum(axis=1)


def _locate(weights: Float[Array, "b v"], goal_of: Callable[[Array], Array]) -> Int[Array, " b"]:
    """Return the first index, int32, at which the cumulative weight exceeds a goal.

    The sums of blocks are searched first: cumulative sums over the vocabulary are slow on a CPU.
    Weights are at least 0, their columns a multiple of BLOCK. `goal_of` returns the goal, below the
    sum, given the sum. The index has a positive weight; it is -1 if rounding leaves none.
    """
    blocks = weights.reshape(len(weights), -1, BLOCK)
    sums = blocks.sum(axis=2)
    ends = jnp.cumsum(sums, axis=1)
    goal = goal_of(ends[:, -1])
    block = _first((ends > goal[:, None]) & (sums > 0))
    place = jnp.maximum(block, 0)[:, None]
    inside = jnp.take_along_axis(blocks, place[:, :, None], axis=1)[:, 0]
    goal -= jnp.take_along_axis(ends - sums, place, axis=1)[:, 0]
    index = _first((jnp.cumsum(inside, axis=1) > goal[:, None]) & (inside > 0))
    return jnp.where((block < 0) | (index < 0), -1, block * BLOCK + index)


def _first(mask: Bool[Array, "b n"]) -> Int[Array, " b"]:
    """Return the index of the first true element, -1 without one."""
    return jnp.where(mask.any(axis=1), jnp.argmax(mask, axis=1), -1).astype(jnp.int32)


def log_probs_of(logits: Float[Array, "b v"], tokens: Int[Array, " b"], top: int) -> LogProbs:
    """Return log-probabilities of tokens, and of the `top` likeliest tokens (static)."""
    all_ = jax.nn.log_softmax(logits.astype(jnp.float32), axis=1)
    values, likeliest = lax.top_k(all_, min(top, all_.shape[1]))
    return LogProbs(jnp.take_along_axis(all_, tokens[:, None], axis=1)[:, 0], values, likeliest)
