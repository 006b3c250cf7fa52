"""Attention weight of the rows that are not fetched, from their scores, for the tail."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from infinigen_jax.ops.compaction import unpack_marks
from infinigen_jax.ops.indexing import put
from infinigen_jax.ops.reductions import best
from infinigen_jax.selection.select import Request, Rest


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
    if chosen is None:
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
