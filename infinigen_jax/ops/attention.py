"""Attention of one token over cached rows, with the softmax in float32.

Queries are grouped, [b, k, g, d]: g query heads read KV head k. They are already scaled.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.ops.reductions import best, summed

MASKED = -1e30  # finite, so that a block without valid rows gives no NaN


class Part(NamedTuple):
    """Cached tokens in one place, with a mask `valid` per KV head or for all heads.

    Keys and values are separate arrays [b, k, n, d], or both are the same packed rows [b, k, n, 2d]
    with key and value concatenated. Packed rows are used whole, with a query that is zero in the
    value's columns: slicing them would copy them.
    """

    keys: Float[Array, "b k n w"]
    values: Float[Array, "b k n w"]
    valid: Bool[Array, "b kv n"]

    def taken(self, d: int) -> Float[Array, "b k d"]:
        """Return the sum of the valid values (the last d columns), in float32."""
        values = self.values[..., -d:].astype(jnp.float32)
        return jnp.sum(jnp.where(self.valid[..., None], values, 0.0), axis=2)


def packed(rows: Float[Array, "b k n w"], valid: Bool[Array, "b kv n"]) -> Part:
    return Part(rows, rows, valid)


class Tail(NamedTuple):
    """Tokens that are attended approximately: m tokens, each representing many; float32."""

    score: Float[Array, "b k g m"]  # log-sum-exp of the represented scores; -inf for an empty set
    values: Float[Array, "b k m d"]  # sum of the values of `count` of these tokens; always finite
    count: Int[Array, "b kv m"]
    shift: Float[Array, "b k g d"] | None = None  # correction of the mean value of all m together


def soft_capped(scores: Float[Array, "*b"], cap: float | Array | None) -> Float[Array, "*b"]:
    """Return cap * tanh(scores / cap), which is within the cap; the scores if `cap` is None."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def attend(
    q: Float[Array, "b k g d"], part: Part, cap: float | None = None
) -> Float[Array, "b k g d"]:
    """Return the attention of one token over a part."""
    return finish_softmax(softmax_over(q, part, cap), q)


def attend_weighted(
    q: Float[Array, "b k g d"], *parts: Part, tail: Tail | None = None, cap: float | None = None
) -> tuple[Float[Array, "b k g d"], list[Float[Array, "b k g n"]]]:
    """Return the attention over several parts, and each part's weights; a tail has the rest."""
    scores = jnp.concatenate([part_scores(q, part, cap) for part in parts], axis=-1)
    ends = list(itertools.accumulate(part.keys.shape[2] for part in parts))
    of_parts = jnp.split(jax.nn.softmax(scores, axis=-1), ends[:-1], axis=-1)
    output = jnp.zeros(q.shape, jnp.float32)
    for part, weights in zip(parts, of_parts, strict=True):
        output += _weighted_sum(weights, part.values, q.shape[-1])
    if tail is not None:
        output, kept_weight = _with_tail(output, jax.nn.logsumexp(scores, axis=-1), tail)
        of_parts = [weights * kept_weight for weights in of_parts]
    return output.astype(q.dtype), of_parts


def _with_tail(
    output: Float[Array, "b k g d"], log_total: Float[Array, "b k g"], tail: Tail
) -> tuple[Float[Array, "b k g d"], Float[Array, "b k g 1"]]:
    """Return the output including the tail, and the total weight of the other tokens.

    An empty tail changes nothing: the factor is exactly 1 and the added term exactly 0.
    """
    log_tail = jax.nn.logsumexp(tail.score, axis=-1)
    total = jnp.logaddexp(log_total, log_tail)
    kept = jnp.exp(log_total - total)[..., None]
    count = jnp.maximum(tail.count, 1).astype(jnp.float32)[:, :, None]
    shares = jnp.exp(tail.score - total[..., None]) / count
    output = output * kept + jnp.einsum("bkgm,bkmd->bkgd", shares, tail.values)
    if tail.shift is not None:
        output = output + tail.shift * jnp.exp(log_tail - total)[..., None]
    return output, kept


class Softmax(NamedTuple):
    """Online softmax in progress: peak score, sum of weights, weighted sum of values."""

    peak: Float[Array, "*b"]
    total: Float[Array, "*b"]
    weighted: Float[Array, "*b d"]


def start_softmax(q: Float[Array, "*b d"]) -> Softmax:
    """Return the state before any row is attended."""
    zeros = jnp.zeros(q.shape, jnp.float32)
    return Softmax(jnp.full(q.shape[:-1], MASKED, jnp.float32), zeros[..., 0], zeros)


def softmax_over(q: Float[Array, "b k g d"], part: Part, cap: float | None = None) -> Softmax:
    """Return the state after some rows."""
    scores = part_scores(q, part, cap)
    peak = best(scores)
    weights = jnp.where(part.valid[:, :, None], jnp.exp(scores - peak[..., None]), 0.0)
    total = summed(lambda weights: weights, weights)
    return Softmax(peak, total, _weighted_sum(weights, part.values, q.shape[-1]))


def join_softmax(one: Softmax, other: Softmax) -> Softmax:
    """Combine the states of two disjoint sets of rows."""
    peak = jnp.maximum(one.peak, other.peak)
    first, second = jnp.exp(one.peak - peak), jnp.exp(other.peak - peak)
    weighted = one.weighted * first[..., None] + other.weighted * second[..., None]
    return Softmax(peak, one.total * first + other.total * second, weighted)


def join_parts(parts: Softmax, valid: Bool[Array, "b k m"] | None = None) -> Softmax:
    """Combine the states [b, k, m, g] of m disjoint sets of rows, or of those that are valid."""
    peaks = parts.peak if valid is None else jnp.where(valid[..., None], parts.peak, MASKED)
    peak = jnp.max(peaks, axis=2)
    kept = jnp.exp(peaks - peak[:, :, None])
    if valid is not None:  # the others may hold another sequence's infinity
        kept = jnp.where(valid[..., None], kept, 0.0)
        total = jnp.where(valid[..., None], parts.total, 0.0)
        weighted = jnp.where(valid[..., None, None], parts.weighted, 0.0)
        parts = Softmax(peaks, total, weighted)
    weighted = jnp.einsum("bkmgd,bkmg->bkgd", parts.weighted, kept)
    return Softmax(peak, jnp.sum(parts.total * kept, axis=2), weighted)


def finish_softmax(
    state: Softmax, q: Float[Array, "b k g d"], tail: Tail | None = None
) -> Float[Array, "b k g d"]:
    """Return the attention output over all rows attended so far."""
    output = state.weighted / state.total[..., None]
    if tail is not None:
        output, _ = _with_tail(output, state.peak + jnp.log(state.total), tail)
    return output.astype(q.dtype)


def part_scores(
    q: Float[Array, "b k g d"], part: Part, cap: float | None
) -> Float[Array, "b k g n"]:
    """Return the attention logits, float32; MASKED for rows that are not valid."""
    width = part.keys.shape[-1] - q.shape[-1]
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, width)))

    def keys_first(q: Array, keys: Array) -> Array:
        """Read the keys once on a CPU, where a product with few queries rearranges them first."""
        scores = jnp.einsum("bknd,bkgd->bkng", keys, q, preferred_element_type=jnp.float32)
        return lax.optimization_barrier(scores).swapaxes(2, 3)  # or XLA exchanges the operands

    def queries_first(q: Array, keys: Array) -> Array:
        return jnp.einsum("bkgd,bknd->bkgn", q, keys, preferred_element_type=jnp.float32)

    scores = lax.platform_dependent(q, part.keys, cpu=keys_first, default=queries_first)
    return jnp.where(part.valid[:, :, None], soft_capped(scores, cap), MASKED)


def _weighted_sum(
    weights: Float[Array, "b k g n"], values: Float[Array, "b k n w"], d: int
) -> Float[Array, "b k g d"]:
    """Return the weighted sum of the values (the last d columns), multiplied in their dtype."""
    weights = weights.astype(values.dtype)
    sums = jnp.einsum("bkgn,bknd->bkgd", weights, values, preferred_element_type=jnp.float32)
    return sums[..., -d:]
