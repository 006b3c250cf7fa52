"""Top-k of a row by searching the threshold that separates the largest entries.

A pass counts the entries above a guess. Sorting the context, or `lax.top_k`, takes many times as
long on a CPU.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from infinigen_jax.ops.compaction import compact_words, marked, pack_marks
from infinigen_jax.ops.reductions import best

FEW = 32  # number of open entries at which the search compares them directly
_NOTHING = 0x7FC00000  # the bits of a NaN, a threshold that no entry reaches
_SMALLEST = 0x00800000  # the key of the smallest normal number
_LOWEST = -(2**31)  # below the keys of all numbers


def top_mask(rank: Float[Array, "b k t"], count: Int[Array, "b k"]) -> Bool[Array, "b k t"]:
    """Mark the `count` largest entries of each row, equal ones in order of position. No NaN.

    The search counts entries above a threshold; each pass reads the row once. Thresholds are
    order-preserving integers, so the search ends exactly. It stops early once a threshold separates
    `count` entries, and does not start if every candidate is taken. Guesses are interpolated; after
    six passes every third one bisects. Once FEW entries remain open, they are extracted and
    compared with each other. Normally distributed scores take 6 or 7 passes, bisection alone 19.
    """
    return top_marks(rank, count, rank > -jnp.inf)[0]


def top_marks(
    rank: Float[Array, "b k t"], count: Int[Array, "b k"], candidates: Bool[Array, "b k t"]
) -> tuple[Bool[Array, "b k t"], UInt32[Array, "b k v"]]:
    """Return `top_mask` of the candidates, all above -inf, and the mask packed into words."""
    words = pack_marks(candidates)
    above = marked(words)

    def search(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        candidates = state[0]
        mask = _searched(jnp.where(candidates, rank, -jnp.inf), count, candidates, above)
        return mask, pack_marks(mask), jnp.bool_(False)

    # A loop of at most one pass: a condition would copy the marks even without a search.
    state = candidates, words, jnp.any(above != count)
    return lax.while_loop(lambda state: state[2], search, state)[:2]


def _searched(
    rank: Float[Array, "b k t"],
    count: Int[Array, "b k"],
    finite: Bool[Array, "b k t"],
    above: Int[Array, "b k"],
) -> Bool[Array, "b k t"]:
    """Search as described in `top_mask`, with `above` entries in `finite`."""
    # Invariant: at least `count` entries are >= low, fewer than `count` are >= high.
    lowest, highest = _key(-best(jnp.where(finite, -rank, -jnp.inf))), _key(best(rank))
    enough, none = (above >= count) & (above > 0), count == 0
    low = jnp.where(enough, lowest, _key(jnp.float32(-jnp.inf)))
    at_low = jnp.where(enough, above, rank.shape[-1])
    low, at_low = jnp.where(none, _NOTHING, low), jnp.where(none, 0, at_low)
    # The upper bound 0 needs the smallest number that compares greater (subnormals do not).
    high = jnp.where(highest == 0, _SMALLEST, highest + 1)
    state = _Search(low, high, at_low, jnp.zeros_like(count), jnp.int32(0))

    def searching(state: _Search) -> Bool[Array, ""]:
        return jnp.any(state.open(count) & (state.at_low - state.at_high > FEW))

    def step(state: _Search) -> _Search:
        guess = _interpolated(state, _aim(state, count), rank.shape[-1])
        trusted = (state.passes < 6) | (state.passes % 3 < 2)
        middle = jnp.where(trusted, guess, _halfway(state))
        middle = jnp.clip(middle, state.low + 1, jnp.maximum(state.high - 1, state.low + 1))
        at_least = marked(pack_marks(rank >= _value(middle)[..., None]))
        open_ = state.open(count)
        up, down = open_ & (at_least >= count), open_ & (at_least < count)
        return _Search(
            jnp.where(up, middle, state.low),
            jnp.where(down, middle, state.high),
            jnp.where(up, at_least, state.at_low),
            jnp.where(down, at_least, state.at_high),
            state.passes + 1,
        )

    state = lax.while_loop(searching, step, state)
    unfinished = jnp.any(state.open(count))
    state = lax.cond(unfinished, lambda: _finished(state, rank, count), lambda: state)
    threshold = _value(state.low)[..., None]
    mask = rank >= threshold

    def without_surplus() -> Array:
        """Unmark the last of the entries that equal the threshold."""
        tied = rank == threshold
        order = jnp.cumsum(tied.astype(jnp.int32), axis=-1)
        keep = order <= order[..., -1:] - (state.at_low - count)[..., None]
        return mask & (~tied | keep)

    return lax.cond(jnp.any(state.at_low > count), without_surplus, lambda: mask)


class _Search(NamedTuple):
    """Interval of thresholds, as keys: `at_low` entries are >= low, `at_high` are >= high."""

    low: Int[Array, "b k"]
    high: Int[Array, "b k"]
    at_low: Int[Array, "b k"]
    at_high: Int[Array, "b k"]
    passes: Int[Array, ""]

    def open(self, count: Int[Array, "b k"]) -> Bool[Array, "b k"]:
        """Return where the threshold is not known yet."""
        return (self.at_low != count) & (self.low < self.high - 1)


def _finished(state: _Search, rank: Float[Array, "b k t"], count: Int[Array, "b k"]) -> _Search:
    """Finish a search whose open intervals have at most FEW entries."""
    t = rank.shape[-1]
    few = min(FEW, t)
    low, high = (_value(x)[..., None] for x in (state.low, state.high))
    # As in the search: the key after the largest number is a NaN, and subnormals compare equal.
    words = pack_marks((rank >= low) & ~(rank >= high))
    slots = compact_words(words, few)
    number = (state.at_low - state.at_high)[..., None]
    open_entries = lax.broadcasted_iota(jnp.int32, slots.shape, 2) < number
    values = jnp.take_along_axis(rank, slots, axis=2)
    values = jnp.where(open_entries, _key(values), _LOWEST)
    # Number of entries of the row that are at least as large as each of them.
    at_least = values[..., None, :] >= values[..., None]
    reached = state.at_high[..., None] + jnp.sum(at_least, axis=-1, dtype=jnp.int32)
    low = jnp.max(jnp.where(reached >= count[..., None], values, _LOWEST), axis=-1)
    at_low = jnp.min(jnp.where(values == low[..., None], reached, t), axis=-1)
    open_ = state.open(count)
    return state._replace(
        low=jnp.where(open_, low, state.low), at_low=jnp.where(open_, at_low, state.at_low)
    )


def _halfway(state: _Search) -> Int[Array, "b k"]:
    return (state.low >> 1) + (state.high >> 1) + (state.low & state.high & 1)


def _aim(state: _Search, count: Int[Array, "b k"]) -> Int[Array, "b k"]:
    """Return the number of entries that the next threshold should separate, normally `count`.

    If one end of the interval is near, aim beyond `count` on the other side, to move the other end.
    """
    below, above = state.at_low - count <= FEW // 2, count - state.at_high <= FEW // 2
    return jnp.where(below == above, count, jnp.where(below, count - FEW // 4, count + FEW // 4))


def _interpolated(state: _Search, count: Int[Array, "b k"], length: int) -> Int[Array, "b k"]:
    """Return the threshold for the count as if the upper tail of the scores were normal."""

    def deviations(entries: Int[Array, "b k"]) -> Float[Array, "b k"]:
        share = jnp.maximum(entries.astype(jnp.float32), 0.5) / (2.0 * length)
        return jnp.sqrt(-jnp.log(jnp.minimum(share, 1.0)))

    start = deviations(state.at_low)
    span = jnp.maximum(deviations(state.at_high) - start, 1e-6)
    low, high = _value(state.low), _value(state.high)
    guess = low + (high - low) * ((deviations(count) - start) / span)
    return jnp.where(jnp.isfinite(guess), _key(guess), _halfway(state))


def _key(x: Float[Array, "*b"]) -> Int[Array, "*b"]:
    """Map float32 to int32, preserving the order."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # -0.0 and subnormals compare equal to 0.0. (XLA removes "+ 0.0".)
    return jnp.where(x == 0, 0, jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits))


def _value(key: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """Return the inverse of `_key`."""
    bits = jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key)
    return lax.bitcast_convert_type(bits, jnp.float32)
