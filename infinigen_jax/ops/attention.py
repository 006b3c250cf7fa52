"""Attention of one token over cached rows. Softmax in float32.

Queries come grouped, [b, k, g, d]: the g query heads that read KV head k, already scaled.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e30  # finite, so that a block without a valid row makes no NaN


class Part(NamedTuple):
    """Cached tokens in one place. `valid` tells which of them count, of each KV head or of all.

    Keys and values are apart [b, k, n, d], or both are the same packed rows [b, k, n, 2d], key and
    value side by side: used whole, with a query that is zero where the value lies, they need not
    be taken apart, which would copy them.
    """

    keys: Float[Array, "b k n w"]
    values: Float[Array, "b k n w"]
    valid: Bool[Array, "b kv n"]

    def taken(self, d: int) -> Float[Array, "b k d"]:
        """Sum of the values, the last d columns, in float32."""
        values = self.values[..., -d:].astype(jnp.float32)
        return jnp.sum(jnp.where(self.valid[..., None], values, 0.0), axis=2)


def packed(rows: Float[Array, "b k n w"], valid: Bool[Array, "b kv n"]) -> Part:
    """A Part of packed rows."""
    return Part(rows, rows, valid)


class Tail(NamedTuple):
    """All that is attended to besides, as m tokens, each in the place of many.

    Attributes:
        score: natural logarithm of the summed exponentials of its tokens' scores, float32; -inf
            if there are none.
        values: the sum of the values of `count` of its tokens, float32; finite in any case.
        shift: what is to be added to the values of all m tokens, float32; None for nothing.
    """

    score: Float[Array, "b k g m"]
    values: Float[Array, "b k m d"]
    count: Int[Array, "b kv m"]
    shift: Float[Array, "b k g d"] | None = None


def attend(q: Float[Array, "b k g d"], *parts: Part) -> Float[Array, "b k g d"]:
    """Attention of one token over the union of several parts, as if they were one cache."""
    return attend_weighted(q, *parts)[0]


def attend_weighted(
    q: Float[Array, "b k g d"], *parts: Part, tail: Tail | None = None
) -> tuple[Float[Array, "b k g d"], list[Float[Array, "b k g n"]]]:
    """As `attend`, and the weights of each part; a tail has what is missing to a sum of 1."""
    scores = jnp.concatenate([_scores(q, part) for part in parts], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)
    output = jnp.zeros(q.shape, jnp.float32)
    of_parts, start = [], 0
    for part in parts:
        stop = start + part.keys.shape[2]
        of_parts.append(weights[..., start:stop])
        output += _weighted_sum(of_parts[-1], part.values, q.shape[-1])
        start = stop
    if tail is not None:
        output, kept = _with_tail(output, jax.nn.logsumexp(scores, axis=-1), tail)
        of_parts = [weights * kept for weights in of_parts]
    return output.astype(q.dtype), of_parts


def _with_tail(
    output: Float[Array, "b k g d"], log_total: Float[Array, "b k g"], tail: Tail
) -> tuple[Float[Array, "b k g d"], Float[Array, "b k g 1"]]:
    """The output with the tail in it, and what the weights of the other tokens sum to.

    A factor of exactly 1, and a term of exactly 0, where there is no tail.
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
    """A softmax-weighted sum in progress (the online form): peak, sum of weights, sum of rows."""

    peak: Float[Array, "b k g"]
    total: Float[Array, "b k g"]
    weighted: Float[Array, "b k g d"]


def start_softmax(q: Float[Array, "b k g d"]) -> Softmax:
    """Nothing attended yet."""
    shape = q.shape[:-1]
    zeros = jnp.zeros(q.shape, jnp.float32)
    return Softmax(jnp.full(shape, MASKED, jnp.float32), zeros[..., 0], zeros)


def extend_softmax(state: Softmax, q: Float[Array, "b k g d"], part: Part) -> Softmax:
    """Attend to further rows."""
    scores = _scores(q, part)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=-1))
    kept = jnp.exp(state.peak - peak)
    weights = jnp.where(part.valid[:, :, None], jnp.exp(scores - peak[..., None]), 0.0)
    total = state.total * kept + jnp.sum(weights, axis=-1)
    weighted = state.weighted * kept[..., None] + _weighted_sum(weights, part.values, q.shape[-1])
    return Softmax(peak, total, weighted)


def join_softmax(one: Softmax, other: Softmax) -> Softmax:
    """Of the rows of both, none of which is in both."""
    peak = jnp.maximum(one.peak, other.peak)
    kept = [jnp.exp(part.peak - peak) for part in (one, other)]
    total = one.total * kept[0] + other.total * kept[1]
    weighted = one.weighted * kept[0][..., None] + other.weighted * kept[1][..., None]
    return Softmax(peak, total, weighted)


def finish_softmax(
    state: Softmax, q: Float[Array, "b k g d"], tail: Tail | None = None
) -> Float[Array, "b k g d"]:
    """The attention output over everything attended so far."""
    output = state.weighted / state.total[..., None]
    if tail is not None:
        output, _ = _with_tail(output, state.peak + jnp.log(state.total), tail)
    return output.astype(q.dtype)


def _scores(q: Float[Array, "b k g d"], part: Part) -> Float[Array, "b k g n"]:
    width = part.keys.shape[-1] - q.shape[-1]
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, width)))
    scores = jnp.einsum("bkgd,bknd->bkgn", q, part.keys, preferred_element_type=jnp.float32)
    return jnp.where(part.valid[:, :, None], scores, MASKED)


def _weighted_sum(
    weights: Float[Array, "b k g n"], values: Float[Array, "b k n w"], d: int
) -> Float[Array, "b k g d"]:
    """Sum of the values, the last d columns; weights take the values' dtype for the product."""
    weights = weights.astype(values.dtype)
    b, k, g, n = weights.shape
    if n >= 4096 and n % 8 == 0:
        # A long single dot product runs at half the memory bandwidth on the CPU; eight side by
        # side run at all of it.
        weights = weights.reshape(b, k, g, 8, n // 8)
        values = values.reshape(b, k, 8, n // 8, values.shape[-1])
        sums = jnp.einsum("bkgcn,bkcnd->bkcgd", weights, values, preferred_element_type=jnp.float32)
        return jnp.sum(sums, axis=2)[..., -d:]
    sums = jnp.einsum("bkgn,bknd->bkgd", weights, values, preferred_element_type=jnp.float32)
    return sums[..., -d:]
