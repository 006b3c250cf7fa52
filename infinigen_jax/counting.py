"""How many rows: rules that go beyond a threshold per KV head.

    pooled   one budget for a layer: the best of all its KV heads together
    top-p    each KV head the fewest tokens that hold a share of its probability

Both narrow a head's best candidates down, so that everything but finding those is on arrays of a
request's size. Ranks are logarithms of the group's summed softmax (`selection.group_rank`), which
are comparable between heads.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.compaction import compact, unpack_marks
from infinigen_jax.lanes import best
from infinigen_jax.selection import Request, Rest
from infinigen_jax.tables import put
from infinigen_jax.threshold import top_mask

POOL = 2  # a head's share of a pool is at most so many times its own budget


def pooled(rank: Float[Array, "b k n"], total: Int[Array, " b"]) -> Bool[Array, "b k n"]:
    """Mark the `total` best candidates of all KV heads of a sequence together.

    Args:
        rank: of each head's candidates; -inf for padding, which is never marked.
        total: over all heads; all candidates are marked if there are fewer.
    """
    b, k, n = rank.shape
    together = rank.reshape(b, 1, k * n)
    there = jnp.sum(together > -jnp.inf, axis=-1, dtype=jnp.int32)
    return top_mask(together, jnp.minimum(total[:, None], there)).reshape(b, k, n)


def holding(rank: Float[Array, "b k n"], mass: float) -> Bool[Array, "b k n"]:
    """Mark the fewest candidates of each KV head whose probabilities sum to `mass` or more.

    All of them where they hold less. Equal probabilities are marked together.

    Args:
        rank: natural logarithms of probabilities; -inf for padding, which is never marked.
        mass: in (0, 1].
    """
    probability = jnp.exp(rank)
    # The threshold with mass on its upper side, by bisection on the float's bits: those of
    # numbers that are not negative are in the numbers' own order.
    low = jnp.zeros(rank.shape[:2], jnp.int32)
    high = jnp.full(rank.shape[:2], lax.bitcast_convert_type(jnp.float32(2.0), jnp.int32))

    def halve(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = state
        middle = low + (high - low) // 2
        threshold = lax.bitcast_convert_type(middle, jnp.float32)[..., None]
        held = jnp.sum(jnp.where(probability >= threshold, probability, 0.0), axis=-1)
        enough = held >= mass
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, _ = lax.fori_loop(jnp.int32(0), jnp.int32(31), halve, (low, high))
    threshold = lax.bitcast_convert_type(low, jnp.float32)[..., None]
    return (probability >= threshold) & (rank > -jnp.inf)


def narrow(
    slots: Int[Array, "b k n"], keep: Bool[Array, "b k n"]
) -> tuple[Int[Array, "b k n"], Int[Array, "b k"]]:
    """The slots that are kept, in front and in their order, slot 0 behind them; their number."""
    count = jnp.sum(keep, axis=-1, dtype=jnp.int32)
    place = compact(keep, slots.shape[2])
    meant = lax.broadcasted_iota(jnp.int32, slots.shape, 2) < count[..., None]
    return jnp.where(meant, jnp.take_along_axis(slots, place, axis=2), 0), count


def log_rest(
    scores: Float[Array, "b k g t"],
    eligible: Bool[Array, "b kv t"] | None,
    request: Request,
    blocks: int = 1,
    entries: Callable[[Float[Array, "b k g t"]], Float[Array, "b k g c"]] | None = None,
) -> Rest:
    """What is not requested, by its scores.

    On a CPU nothing is also what is so light next to the head's best score, requested or not, that
    a float32 cannot hold it, e^-87 of that.

    Args:
        eligible: tokens that may be requested; None if the scores of all others are -inf.
        blocks: of consecutive slots, each summed for itself; their number m divides t.
        entries: sums of the index's leading columns with given weights, for `Rest.entry`.
    """
    b, k, g, t = scores.shape
    chosen = request.chosen
    if chosen is None and request.marks is not None:
        chosen = unpack_marks(request.marks, t)
    if chosen is None:
        left = jnp.broadcast_to(jnp.bool_(True) if eligible is None else eligible, (b, k, t))
        left = put(left, jnp.where(request.valid, request.slots, t), False)
    else:
        left = ~chosen if eligible is None else eligible & ~chosen
    rest = jnp.where(left[:, :, None], scores, -jnp.inf).reshape(b, k, g, blocks, t // blocks)

    def of_head(scores: Array, rest: Array) -> Array:
        """The best score of all, which the selection has found already."""
        if eligible is not None:
            scores = jnp.where(eligible[:, :, None], scores, -jnp.inf)
        return jnp.broadcast_to(best(scores)[..., None], (b, k, g, blocks))

    def of_block(scores: Array, rest: Array) -> Array:
        """With this one, one launch on a GPU does without the scores in memory."""
        return jnp.max(rest, axis=-1)

    peak = lax.platform_dependent(scores, rest, cpu=of_head, default=of_block)
    shares = jnp.exp(rest - jnp.where(peak == -jnp.inf, 0.0, peak)[..., None])
    # As a dot product, as `jax.nn.logsumexp` does not: several times faster on the CPU.
    ones = jnp.ones(t // blocks, jnp.float32)
    total = jnp.einsum("bkgms,s->bkgm", shares, ones, precision="highest")
    score = jnp.log(total) + peak
    if entries is None:
        return Rest(score)

    def level(shares: Array, total: Array, peak: Array) -> tuple[Array, Array]:
        """All blocks relative to the same peak."""
        highest = jnp.max(peak, axis=-1, keepdims=True)
        below = jnp.exp(peak - jnp.where(highest == -jnp.inf, 0.0, highest))
        return shares * below[..., None], total * below

    def as_they_are(shares: Array, total: Array, peak: Array) -> tuple[Array, Array]:
        """So they are with `of_head`."""
        return shares, total

    weights, total = lax.platform_dependent(shares, total, peak, cpu=as_they_are, default=level)
    everything = jnp.sum(total, axis=-1)
    sums = entries(weights.reshape(scores.shape))
    return Rest(score, sums / jnp.where(everything > 0, everything, 1.0)[..., None])
