"""From speculated scores to the slots that are fetched (InfiniGen, section 4.3).

All of it is per sequence and KV head, with static shapes: at most n slots, of which the first
`count` are meant. Nothing is read back by the host.
"""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from infinigen_jax.compaction import compact_words, marked, pack_marks
from infinigen_jax.lanes import best
from infinigen_jax.tables import put

FEW = 32  # entries among which the search for a threshold ends by comparing them
_NOTHING = 0x7FC00000  # the bits of a NaN: a threshold that nothing reaches
_SMALLEST = 0x00800000  # the key of the smallest normal number
_LOWEST = -(2**31)  # below the keys of all numbers
ROUNDING = 2.0**-22  # of a number: more than a float32 is rounded by


class Rest(NamedTuple):
    """What is on the host only and not requested, for each query head.

    Attributes:
        score: logarithm of the summed exponentials of the scores, of all of it (m = 1) or of each
            block of slots; -inf where there is nothing.
        entry: mean of the index's c leading columns, by the weights of the scores, of all of it;
            zeros where there is nothing. None where nobody asked.
    """

    score: Float[Array, "b k g m"]
    entry: Float[Array, "b k g c"] | None = None


class Bounds(NamedTuple):
    """Ranks of which none is below `low` or above `high`; nothing may be between them."""

    low: Float[Array, "b k"]
    high: Float[Array, "b k"]


class Request(NamedTuple):
    """Which rows a layer wants.

    Attributes:
        slots: host cache slots, all within the cache; those at `count` and beyond are padding.
        count: how many of the slots are meant, per sequence and KV head.
        rank: order of preference among all slots, for whoever has to choose rows to give up; None
            where it is not known or not wanted any more.
        rest: what is on the host only and not meant; None where there is no tail, or where it is
            scored when the layer attends.
        chosen: the slots that are meant, marked; None where the selection did not mark them.
        marks: `chosen` in words (`pack_marks`), from which slots can be had where they are needed.
            A step keeps them instead of `chosen` where rows are read in place; None elsewhere, and
            where the selection did not make them.
    """

    slots: Int[Array, "b k n"]
    count: Int[Array, "b k"]
    rank: Float[Array, "b k t"] | None = None
    rest: Rest | None = None
    chosen: Bool[Array, "b k t"] | None = None
    marks: UInt32[Array, "b k v"] | None = None

    @property
    def valid(self) -> Bool[Array, "b k n"]:
        """Which of the slots are meant."""
        place = lax.broadcasted_iota(jnp.int32, self.slots.shape, 2)
        return place < self.count[..., None]


def budget_fraction(budget: float) -> Fraction:
    """A budget as a fraction of small integers, so that `floor(budget * n)` is exact in int32."""
    return Fraction(budget).limit_denominator(1000)


def budget_rows(budget: float, tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """floor(budget * tokens), exact for up to two million tokens."""
    share = budget_fraction(budget)
    return tokens * share.numerator // share.denominator


def group_margin(scores: Float[Array, "b k g t"]) -> Float[Array, "b k t"]:
    """How far a token is below the best one, for the query head of the group that wants it most.

    Always <= 0; -inf for tokens whose scores are all -inf. A token is worth fetching if any head
    of the group would fetch it, so that the bound e^-alpha on what is skipped holds for each.
    """
    peak = best(scores)
    return jnp.max(scores - jnp.where(peak == -jnp.inf, 0.0, peak)[..., None], axis=2)


def group_rank(
    scores: Float[Array, "b k g t"], between_heads: bool = False
) -> Float[Array, "b k t"]:
    """Order of preference among tokens: the sum over the group of the softmax of the scores.

    Given as its logarithm (the search of `top_mask` is quicker on those); for a group of one, as
    the scores themselves, which have the same order, unless ranks are to be compared
    `between_heads`. -inf where all scores are.
    """
    if scores.shape[2] == 1 and not between_heads:
        return scores[:, :, 0]
    log_total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    log_total = jnp.where(log_total == -jnp.inf, 0.0, log_total)
    return jax.nn.logsumexp(scores - log_total, axis=2)


def combine_counts(
    counts: Int[Array, "b k"], cap: Int[Array, "#b #k"], mode: str
) -> Int[Array, "b k"]:
    """Rows to fetch from the numbers of tokens that pass the threshold.

    "head": each KV head its own count. "mean": the mean over all heads and sequences, rounded
    down, for all (the paper's released code; couples the sequences of a batch).
    """
    if mode == "mean":
        mean = jnp.sum(counts) // counts.size
        counts = jnp.full(counts.shape, mean, counts.dtype)
    return jnp.minimum(counts, cap)


def select(
    scores: Float[Array, "b k g t"],
    eligible: Bool[Array, "b t"] | Bool[Array, "b kv t"] | None,
    alpha: float,
    cap: Int[Array, " b"],
    size: int,
    mode: str = "head",
) -> Request:
    """Choose the rows to fetch.

    Args:
        scores: speculated attention logits, float32, in units of the true logits.
        eligible: tokens that may be fetched (cached on the host, not resident on the device), for
            each KV head or for all; None if the scores of all others are -inf.
        alpha: a token passes if its score is above the best score minus alpha (strictly), for any
            query head of the group; `inf` lets every token pass.
        cap: most rows per KV head, for each sequence.
        size: static length n of the request, at least the largest cap.
        mode: see `combine_counts`.
    """
    if eligible is not None:
        eligible = eligible if eligible.ndim == 3 else eligible[:, None]
        scores = jnp.where(eligible[:, :, None], scores, -jnp.inf)
    passing = group_margin(scores) > -alpha
    between = _bounds(scores, alpha) if mode == "head" else None
    count = combine_counts(_entries(passing), cap[:, None], mode)
    rank = group_rank(scores)
    if mode != "head":  # the mean may be above a head's own count: the rest comes in order of rank
        count = jnp.minimum(count, _entries(rank > -jnp.inf))
    slots, chosen, marks = top_choice(
        rank, count, size, passing if mode == "head" else None, between
    )
    return Request(slots, count, rank, chosen=chosen, marks=marks)


def _bounds(scores: Float[Array, "b k g t"], alpha: float) -> Bounds | None:
    """Between which ranks the tokens are that pass alpha, where the scores tell."""
    if scores.shape[2] > 1 or not math.isfinite(alpha):
        return None
    high = best(scores)[:, :, 0]
    low = high - alpha
    # A difference that is above -alpha as it was rounded may be a little below.
    return Bounds(low - ROUNDING * (jnp.abs(low) + alpha), high)


def top_slots(
    rank: Float[Array, "b k t"], count: Int[Array, "b k"], size: int
) -> Int[Array, "b k n"]:
    """Slots of the `count` largest ranks of each KV head, in the first places of n = `size`.

    Equal ranks are taken in order of slot. On the CPU, a threshold search and a compaction, linear
    in t, which return the slots ascending (a gather of ascending rows is faster); elsewhere
    `lax.top_k`, by falling rank. The padding behind them is slot 0, which is never unwritten
    memory.
    """
    return top_choice(rank, count, size)[0]


def top_choice(
    rank: Float[Array, "b k t"],
    count: Int[Array, "b k"],
    size: int,
    there: Bool[Array, "b k t"] | None = None,
    between: Bounds | None = None,
) -> tuple[Int[Array, "b k n"], Bool[Array, "b k t"], UInt32[Array, "b k v"]]:
    """`top_slots`, and all of them marked, also in words: what is not used costs nothing.

    Args:
        there: which ranks count, all of them above -inf; None for all that are.
        between: what those ranks are between, if it is known: it saves the search two passes.
    """
    there = rank > -jnp.inf if there is None else there

    def by_threshold(rank: Array, count: Array, there: Array) -> tuple[Array, Array, Array]:
        chosen, marks = _top_marks(rank, count, there, between)
        return compact_words(marks, size), chosen, marks

    def by_sorting(rank: Array, count: Array, there: Array) -> tuple[Array, Array, Array]:
        rank = jnp.where(there, rank, -jnp.inf)
        rank = jnp.where(rank == 0, jnp.float32(0.0), rank)  # `lax.top_k` puts -0.0 behind 0.0
        slots = lax.top_k(rank, size)[1]
        meant = Request(slots, count).valid
        chosen = put(jnp.zeros_like(there), jnp.where(meant, slots, there.shape[2]), True)
        return slots, chosen, pack_marks(chosen)

    slots, chosen, marks = lax.platform_dependent(
        rank, count, there, cpu=by_threshold, default=by_sorting
    )
    return jnp.where(Request(slots, count).valid, slots, 0), chosen, marks


def _entries(mask: Bool[Array, "b k t"]) -> Int[Array, "b k"]:
    """How many are marked, of up to 2^24: on the CPU from words, which are needed anyway."""

    def by_product(mask: Array) -> Array:
        ones = jnp.ones(mask.shape[-1], jnp.float32)
        return jnp.einsum("bkt,t->bk", mask.astype(jnp.float32), ones).astype(jnp.int32)

    return lax.platform_dependent(
        mask, cpu=lambda mask: marked(pack_marks(mask)), default=by_product
    )


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
    return _top_marks(rank, count, rank > -jnp.inf if there is None else there)[0]


def _top_marks(
    rank: Float[Array, "b k t"],
    count: Int[Array, "b k"],
    there: Bool[Array, "b k t"],
    between: Bounds | None = None,
) -> tuple[Bool[Array, "b k t"], UInt32[Array, "b k v"]]:
    """`top_mask`, also in words."""
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
