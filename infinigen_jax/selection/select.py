"""Selection of the cache slots to fetch, from speculated scores (section 4.3 of the paper).

Everything is computed per sequence and KV head on the device, with static shapes. A request has n
slots, of which the first `count` are valid. `log_rest` summarises the other rows, for the tail.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from infinigen_jax.numeric import LEAST_SHARE
from infinigen_jax.ops.compaction import compact_words, marked, pack_marks, unpack_marks
from infinigen_jax.ops.indexing import put
from infinigen_jax.ops.reductions import best, summed
from infinigen_jax.ops.top_k import top_marks


class Rest(NamedTuple):
    """Host-only rows that were not requested, summarised for each query head.

    Attributes:
        score: log-sum-exp of the scores, over all rows (m = 1) or over each block of slots;
            -inf for an empty set. A mean key's logit is added later, except to capped scores.
        entry: mean of the index's c leading columns over all these rows, weighted by the scores'
            softmax; zeros for an empty set; None if not computed.
    """

    score: Float[Array, "b k g m"]
    entry: Float[Array, "b k g c"] | None = None


class Request(NamedTuple):
    """Rows that a layer requests from the host cache.

    Attributes:
        slots: host cache slots, all within the cache; those from `count` on are padding. The others
            are distinct, and of rows that are only on the host (`Budgeted.eligible`): attention
            would count a row twice.
        count: number of valid slots, per sequence and KV head.
        rest: summary of the host-only rows left out; None without a tail, or if it is computed
            during attention.
        chosen: mask of the valid slots, if the selection computed it.
        marks: `chosen` packed into words (`pack_marks`), if computed and attention reads rows in
            place: it recomputes slots from them.
    """

    slots: Int[Array, "b k n"]
    count: Int[Array, "b k"]
    rest: Rest | None = None
    chosen: Bool[Array, "b k t"] | None = None
    marks: UInt32[Array, "b k v"] | None = None

    @property
    def valid(self) -> Bool[Array, "b k n"]:
        """Mask of the valid slots."""
        place = lax.broadcasted_iota(jnp.int32, self.slots.shape, 2)
        return place < self.count[..., None]

    def mask(self, capacity: int) -> Bool[Array, "b k t"]:
        """Return a mask of the requested ones of `capacity` slots."""
        nothing = jnp.zeros((*self.count.shape, capacity), jnp.bool)
        return put(nothing, jnp.where(self.valid, self.slots, capacity), True)


def budget_fraction(budget: float) -> Fraction:
    """Return a budget as a fraction of small integers, so that `share_of` is exact in int32.

    Budgets below 1/1000 become unit fractions, and the smallest is LEAST_SHARE.
    """
    if budget < 1 / 1000:  # 1e-9 absorbs the rounding of 1 / m
        return Fraction(1, math.ceil((1 - 1e-9) / max(budget, LEAST_SHARE)))
    return Fraction(budget).limit_denominator(1000)


def budget_rows(budget: float, tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """Return floor(budget * tokens), where `budget_fraction` stands for the budget."""
    share = budget_fraction(budget)
    return share_of(tokens, share.numerator, share.denominator)


def share_of(tokens: Int[Array, "*b"], numerator: Any, denominator: Any) -> Int[Array, "*b"]:
    """Return floor(tokens * numerator / denominator), whose product may be too large for int32."""
    whole, rest = tokens // denominator, tokens % denominator
    return whole * numerator + rest * numerator // denominator


def group_margin(scores: Float[Array, "b k g t"]) -> Float[Array, "b k t"]:
    """Return the distance of each token below the best score, for the group's closest query head.

    At most 0; -inf for tokens whose scores are all -inf. The bound e^-alpha on skipped tokens thus
    holds for each head of the group.
    """
    peak = best(scores)
    return jnp.max(scores - jnp.where(peak == -jnp.inf, 0.0, peak)[..., None], axis=2)


def group_rank(scores: Float[Array, "b k g t"]) -> Float[Array, "b k t"]:
    """Return the rank of tokens: log of the softmax of the scores, summed over the group.

    The threshold search is faster on logarithms. A group of one returns its scores, which have the
    same order. -inf where all scores are -inf.
    """
    if scores.shape[2] == 1:
        return scores[:, :, 0]
    peak = best(scores)[..., None]
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)
    total = summed(lambda scores: jnp.exp(scores - peak), scores)[..., None]
    log_total = jnp.where(total > 0, jnp.log(total) + peak, 0.0)
    return jax.nn.logsumexp(scores - log_total, axis=2)


def select(
    scores: Float[Array, "b k g t"],
    eligible: Bool[Array, "b kv t"] | None,
    alpha: float,
    cap: Int[Array, " b"],
    size: int,
    mode: str = "head",
) -> Request:
    """Choose the rows to fetch.

    Args:
        scores: speculated attention logits, float32, in units of the true logits.
        eligible: tokens that may be fetched (cached on the host, not resident on the device), per
            KV head or for all heads; None if the scores of all others are -inf.
        alpha: a token passes if its score exceeds the best score minus alpha for any query head of
            the group; with `inf` every token passes.
        cap: most rows per KV head, for each sequence.
        size: static length n of the request, at least the largest cap.
        mode: "head" fetches as many rows as pass, per KV head. "mean" fetches the mean of these
            numbers over all heads and sequences, rounded down (the paper's released code; it
            couples the sequences of a batch).
    """
    if eligible is not None:
        scores = jnp.where(eligible[:, :, None], scores, -jnp.inf)
    passing = group_margin(scores) > -alpha
    count, rank = _entries(passing), group_rank(scores)
    if mode == "mean":  # a head may get more than its own count; fill up by rank
        candidates = _entries(rank > -jnp.inf)
        sequences = jnp.sum(jnp.any(candidates > 0, axis=1))  # idle ones have no candidates
        mean = jnp.sum(count) // jnp.maximum(1, sequences * count.shape[1])
        count = jnp.minimum(mean, candidates)
    count = jnp.minimum(count, cap[:, None])
    slots, chosen, marks = top_choice(rank, count, size, passing if mode == "head" else None)
    return Request(slots, count, chosen=chosen, marks=marks)


def top_choice(
    rank: Float[Array, "b k t"],
    count: Int[Array, "b k"],
    size: int,
    candidates: Bool[Array, "b k t"] | None = None,
) -> tuple[Int[Array, "b k n"], Bool[Array, "b k t"], UInt32[Array, "b k v"]]:
    """Return the slots of the `count` largest ranks of each KV head, and their mask in two forms.

    Equal ranks are taken in order of slot. The CPU uses a threshold search and a compaction, both
    linear in t, which return ascending slots (a gather of ascending rows is faster). Elsewhere
    `lax.top_k` returns slots by falling rank. XLA drops results that are not used.

    Args:
        size: length n of the slots. The padding is slot 0, which is never unwritten memory.
        candidates: mask of the ranks that count, all above -inf; None for all ranks above -inf.
    """
    candidates = rank > -jnp.inf if candidates is None else candidates

    def by_threshold(rank: Array, count: Array, candidates: Array) -> tuple[Array, Array, Array]:
        chosen, marks = top_marks(rank, count, candidates)
        return compact_words(marks, size), chosen, marks

    def by_sorting(rank: Array, count: Array, candidates: Array) -> tuple[Array, Array, Array]:
        rank = jnp.where(candidates, rank, -jnp.inf)
        rank = jnp.where(rank == 0, jnp.float32(0.0), rank)  # `lax.top_k` puts -0.0 after 0.0
        slots = lax.top_k(rank, size)[1]
        chosen = Request(slots, count).mask(rank.shape[2])
        return slots, chosen, pack_marks(chosen)

    slots, chosen, marks = lax.platform_dependent(
        rank, count, candidates, cpu=by_threshold, default=by_sorting
    )
    return jnp.where(Request(slots, count).valid, slots, 0), chosen, marks


def log_rest(
    scores: Float[Array, "b k g t"],
    eligible: Bool[Array, "b kv t"] | None,
    request: Request,
    blocks: int = 1,
    entries: Callable[[Float[Array, "b k g t"]], Float[Array, "b k g c"]] | None = None,
) -> Rest:
    """Return the log-sum-exp of the scores of eligible rows that are not requested.

    On the CPU, terms below e^-87 of the head's best score underflow to 0 in float32.

    Args:
        scores: attention logits, float32.
        eligible: tokens that may be requested; None if the scores of all others are -inf.
        blocks: number m of equal blocks of consecutive slots, each summed separately; m divides
            t.
        entries: maps weights to sums of the index's leading columns, for `Rest.entry`.
    """
    b, k, g, t = scores.shape
    chosen = request.chosen
    if chosen is None and request.marks is not None:
        chosen = unpack_marks(request.marks, t)
    if chosen is None:  # one mask: with a second one, a GPU stores the masked scores
        left = jnp.broadcast_to(jnp.bool_(True) if eligible is None else eligible, (b, k, t))
        left = put(left, jnp.where(request.valid, request.slots, t), False)
    else:
        left = ~chosen if eligible is None else eligible & ~chosen
    rest = jnp.where(left[:, :, None], scores, -jnp.inf).reshape(b, k, g, blocks, t // blocks)

    def of_head(scores: Array, rest: Array) -> Array:
        """Return the best score of the head, which the selection has already computed."""
        if eligible is not None:
            scores = jnp.where(eligible[:, :, None], scores, -jnp.inf)
        return jnp.broadcast_to(best(scores)[..., None], (b, k, g, blocks))

    def of_block(scores: Array, rest: Array) -> Array:
        """Return the best score of each block; a GPU then needs one launch and stores no scores."""
        return jnp.max(rest, axis=-1)

    peak = lax.platform_dependent(scores, rest, cpu=of_head, default=of_block)
    shares = jnp.exp(rest - jnp.where(peak == -jnp.inf, 0.0, peak)[..., None])
    # A dot product is several times faster on the CPU than the sum in `jax.nn.logsumexp`.
    ones = jnp.ones(t // blocks, jnp.float32)
    total = jnp.einsum("bkgms,s->bkgm", shares, ones, precision="highest")
    score = jnp.log(total) + peak
    if entries is None:
        return Rest(score)

    def level(shares: Array, total: Array, peak: Array) -> tuple[Array, Array]:
        """Scale all blocks to a common peak."""
        highest = jnp.max(peak, axis=-1, keepdims=True)
        below = jnp.exp(peak - jnp.where(highest == -jnp.inf, 0.0, highest))
        return shares * below[..., None], total * below

    # On a CPU the peak of `of_head` is already common.
    weights, total = lax.platform_dependent(
        shares, total, peak, cpu=lambda shares, total, peak: (shares, total), default=level
    )
    everything = jnp.sum(total, axis=-1)
    sums = entries(weights.reshape(scores.shape))
    return Rest(score, sums / jnp.where(everything > 0, everything, 1.0)[..., None])


def _entries(mask: Bool[Array, "b k t"]) -> Int[Array, "b k"]:
    """Return the number of marked entries, up to 2^24; the CPU counts words it needs anyway."""

    def by_product(mask: Array) -> Array:
        ones = jnp.ones(mask.shape[-1], jnp.float32)
        return jnp.einsum("bkt,t->bk", mask.astype(jnp.float32), ones).astype(jnp.int32)

    return lax.platform_dependent(
        mask, cpu=lambda mask: marked(pack_marks(mask)), default=by_product
    )
