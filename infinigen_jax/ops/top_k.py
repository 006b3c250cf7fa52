"""The largest entries of a row, by searching for the threshold that separates them.

A pass counts what is above a guess; sorting the context, or `lax.top_k`, costs many times as much
on a CPU (`benchmarks.selection`).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from infinigen_jax.ops.compaction import compact_words, marked, pack_marks
from infinigen_jax.ops.reductions import best

FEW = 32  # entries among which the search for a threshold ends by comparing them
_NOTHING = 0x7FC00000  # the bits of a NaN: a threshold that nothing reaches
_SMALLEST = 0x00800000  # the key of the smallest normal number
_LOWEST = -(2**31)  # below the keys of all numbers


class Bounds(NamedTuple):
    """Ranks of which none is below `low` or above `high`; nothing may be between them."""

    low: Float[Array, "b k"]
    high: Float[Array, "b k"]


def top_mask(
    rank: Float[Array, "b k t"],
    count: Int[Array, "b k"],
    there: Bool[Array, "b k t"] | None = None,
) -> Bool[Array, "b k t"]:
    """Mark the `count` largest entries of each row, equal ones in order of position. No NaN.

    Searches the threshold by counting; each pass reads the row once. Thresholds are handled as
    order-preserving integers, so the search ends exactly; it stops early once a threshold separates
    `count` entries, and does not begin where `count` is all that there are. Guesses are
    interpolated, but for every third one if six did not do. Once FEW entries are left to tell
    apart, they are taken out and compared with each other: 6 or 7 passes for normally distributed
    scores, where halving alone takes 19.

    Args:
        there: which ranks count, all of them above -inf; None for all that are.
    """
    return top_marks(rank, count, rank > -jnp.inf if there is None else there)[0]


def top_marks(
    rank: Float[Array, "b k t"],
    count: Int[Array, "b k"],
    there: Bool[Array, "b k t"],
    between: Bounds | None = None,
) -> tuple[Bool[Array, "b k t"], UInt32[Array, "b k v"]]:
    """`top_mask`, also in words.

    Args:
        between: what the ranks that count are between, if it is known: it saves two passes.
    """
    words = pack_marks(there)
    above = marked(words)

    def search(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        there = state[0]
        mask = _searched(jnp.where(there, rank, -jnp.inf), count, there, above, between)
        return mask, pack_marks(mask), jnp.bool_(False)

    # One pass, or none: a condition would copy the marks where it has nothing to do.
    state = there, words, jnp.any(above != count)
    return lax.while_loop(lambda state: state[2], search, state)[:2]


def _searched(
    rank: Float[Array, "b k t"],
    count: Int[Array, "b k"],
    finite: Bool[Array, "b k t"],
    above: Int[Array, "b k"],
    between: Bounds | None = None,
) -> Bool[Array, "b k t"]:
    """The search of `top_mask`, where `above` entries are `finite`."""
    if between is None:
        between = Bounds(-best(jnp.where(finite, -rank, -jnp.inf)), best(rank))
    # Invariant: at least `count` entries are >= low, fewer than `count` are >= high.
    lowest, highest = _key(between.low), _key(between.high)
    enough, none = (above >= count) & (above > 0), count == 0
    low = jnp.where(enough, lowest, _key(jnp.float32(-jnp.inf)))
    found = jnp.where(enough, above, rank.shape[-1])
    low, found = jnp.where(none, _NOTHING, low), jnp.where(none, 0, found)
    # Above 0 is the least number that a processor tells from it.
    high = jnp.where(highest == 0, _SMALLEST, highest + 1)
    state = _Search(low, high, found, jnp.zeros_like(count), jnp.int32(0))

    def searching(state: _Search) -> Bool[Array, ""]:
        return jnp.any(state.open(count) & (state.found - state.over > FEW))

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
            jnp.where(up, at_least, state.found),
            jnp.where(down, at_least, state.over),
            state.passes + 1,
        )

    state = lax.while_loop(searching, step, state)
    unfinished = jnp.any(state.open(count))
    state = lax.cond(unfinished, lambda: _finished(state, rank, count), lambda: state)
    threshold = _value(state.low)[..., None]
    mask = rank >= threshold
    return lax.cond(
        jnp.any(state.found > count),
        lambda: _drop_ties(mask, rank == threshold, state.found - count),
        lambda: mask,
    )


class _Search(NamedTuple):
    """An interval of thresholds, as keys: `found` entries are >= low, `over` are >= high."""

    low: Int[Array, "b k"]
    high: Int[Array, "b k"]
    found: Int[Array, "b k"]
    over: Int[Array, "b k"]
    passes: Int[Array, ""]

    def open(self, count: Int[Array, "b k"]) -> Bool[Array, "b k"]:
        """Where the threshold is not known yet."""
        return (self.found != count) & (self.low < self.high - 1)


def _finished(state: _Search, rank: Float[Array, "b k t"], count: Int[Array, "b k"]) -> _Search:
    """The end of a search, where an interval that is open has at most FEW entries."""
    t = rank.shape[-1]
    few = min(FEW, t)
    low, high = (_value(x)[..., None] for x in (state.low, state.high))
    # As they were counted: above the largest number is NaN, and numbers may be too small to differ.
    words = pack_marks((rank >= low) & ~(rank >= high))
    slots = compact_words(words, few)
    there = lax.broadcasted_iota(jnp.int32, slots.shape, 2) < (state.found - state.over)[..., None]
    values = jnp.take_along_axis(rank, jnp.minimum(slots, t - 1), axis=2)
    values = jnp.where(there, _key(values), _LOWEST)
    # How many entries of the row are at least as large as each of them.
    at_least = values[..., None, :] >= values[..., None]
    reached = state.over[..., None] + jnp.sum(at_least, axis=-1, dtype=jnp.int32)
    low = jnp.max(jnp.where(reached >= count[..., None], values, _LOWEST), axis=-1)
    found = jnp.min(jnp.where(values == low[..., None], reached, t), axis=-1)
    open_ = state.open(count)
    return state._replace(
        low=jnp.where(open_, low, state.low), found=jnp.where(open_, found, state.found)
    )


def _halfway(state: _Search) -> Int[Array, "b k"]:
    return (state.low >> 1) + (state.high >> 1) + (state.low & state.high & 1)


def _aim(state: _Search, count: Int[Array, "b k"]) -> Int[Array, "b k"]:
    """How many entries the next threshold is to have above it: `count`, or where one end of the
    interval is near already, some to the other side, to bring the other end near."""
    below, above = state.found - count <= FEW // 2, count - state.over <= FEW // 2
    return jnp.where(below == above, count, jnp.where(below, count - FEW // 4, count + FEW // 4))


def _interpolated(state: _Search, count: Int[Array, "b k"], length: int) -> Int[Array, "b k"]:
    """Where the count would be met if the scores' upper tail were a normal distribution's."""

    def deviations(entries: Int[Array, "b k"]) -> Float[Array, "b k"]:
        share = jnp.maximum(entries.astype(jnp.float32), 0.5) / (2.0 * length)
        return jnp.sqrt(-jnp.log(jnp.minimum(share, 1.0)))

    start = deviations(state.found)
    span = jnp.maximum(deviations(state.over) - start, 1e-6)
    low, high = _value(state.low), _value(state.high)
    guess = low + (high - low) * ((deviations(count) - start) / span)
    return jnp.where(jnp.isfinite(guess), _key(guess), _halfway(state))


def _drop_ties(
    mask: Bool[Array, "b k t"], tied: Bool[Array, "b k t"], surplus: Int[Array, "b k"]
) -> Bool[Array, "b k t"]:
    """Unmark the last `surplus` of the tied entries."""
    order = jnp.cumsum(tied.astype(jnp.int32), axis=-1)
    keep = order <= order[..., -1:] - surplus[..., None]
    return mask & (~tied | keep)


def _key(x: Float[Array, "*b"]) -> Int[Array, "*b"]:
    """Order-preserving map from float32 to int32."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    # -0.0 is equal to 0.0, and numbers too small to differ from it are. (XLA takes away "+ 0.0".)
    return jnp.where(x == 0, 0, jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits))


def _value(key: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """Inverse of `_key`."""
    bits = jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key)
    return lax.bitcast_convert_type(bits, jnp.float32)
