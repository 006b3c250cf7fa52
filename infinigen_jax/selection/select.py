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

from infinigen_jax.ops.compaction import compact_words, marked, pack_marks
from infinigen_jax.ops.indexing import put
from infinigen_jax.ops.reductions import best
from infinigen_jax.ops.top_k import Bounds, top_marks

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


class Request(NamedTuple):
    """Which rows a layer wants.

    Attributes:
        slots: host cache slots, all within the cache; those at `count` and beyond are padding.
        count: how many of the slots are meant, per sequence and KV head.
        rest: what is on the host only and not meant; None where there is no tail, or where it is
            scored when the layer attends.
        chosen: the slots that are meant, marked; None where the selection did not mark them.
        marks: `chosen` in words (`pack_marks`), from which slots can be had where they are needed.
            A step keeps them instead of `chosen` where rows are read in place; None elsewhere, and
            where the selection did not make them.
    """

    slots: Int[Array, "b k n"]
    count: Int[Array, "b k"]
    rest: Rest | None = None
    chosen: Bool[Array, "b k t"] | None = None
    marks: UInt32[Array, "b k v"] | None = None

    @property
    def valid(self) -> Bool[Array, "b k n"]:
        """Which of the slots are meant."""
        place = lax.broadcasted_iota(jnp.int32, self.slots.shape, 2)
        return place < self.count[..., None]


def budget_fraction(budget: float) -> Fraction:
    """A budget as a fraction of small integers, so that `floor(budget * n)` is exact in int32.

    Below a thousandth, as of few rows in a long context, one of so many.
    """
    if budget < 1 / 1000:
        return Fraction(1, math.ceil((1 - 1e-9) / budget))  # of a float that is one of so many
    return Fraction(budget).limit_denominator(1000)


def budget_rows(budget: float, tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """floor(budget * tokens), exact for up to two million tokens."""
    share = budget_fraction(budget)
    return tokens * share.numerator // share.denominator


def share_rows(share: Int[Array, " 2"], tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """floor(tokens * share[0] / share[1]): `budget_rows` of a share that is data."""
    return tokens * share[0] // share[1]


def group_margin(scores: Float[Array, "b k g t"]) -> Float[Array, "b k t"]:
    """How far a token is below the best one, for the query head of the group that wants it most.

    Always <= 0; -inf for tokens whose scores are all -inf. A token is worth fetching if any head
    of the group would fetch it, so that the bound e^-alpha on what is skipped holds for each.
    """
    peak = best(scores)
    return jnp.max(scores - jnp.where(peak == -jnp.inf, 0.0, peak)[..., None], axis=2)


def group_rank(scores: Float[Array, "b k g t"]) -> Float[Array, "b k t"]:
    """Order of preference among tokens: the sum over the group of the softmax of the scores.

    Given as its logarithm (the search for a threshold is quicker on those); for a group of one, as
    the scores themselves, which have the same order. -inf where all scores are.
    """
    if scores.shape[2] == 1:
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
    return Request(slots, count, chosen=chosen, marks=marks)


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
        chosen, marks = top_marks(rank, count, there, between)
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
