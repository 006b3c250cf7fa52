"""Attention of a few tokens of each sequence over a long cache, which is read once for all of them.

Tiles of scores decide the time of prompt chunks with hundreds of queries. Here the rows do: all
queries of a KV head are the columns of one product with each block of rows. On a CPU, both products
of a few columns take whole rows, key and value: copying the halves would take longer.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.ops.attention import MASKED, Softmax, soft_capped, start_softmax
from infinigen_jax.prefill.prior_rows import NOWHERE, Block, ChunkAttention, PriorRows

MOST_COLUMNS = 32  # of products with whole rows


class Seen(NamedTuple):
    """Rows, and which queries see them: None for all; c is 1 if equal for all queries."""

    keys: Float[Array, "b k n d"]
    values: Float[Array, "b k n d"]
    visible: Bool[Array, "b n c"] | None


def attend_narrow(
    q: Float[Array, "b c h d"],
    near: list[Seen],
    prior: PriorRows,
    positions: Int[Array, "b c"],
    window: int | None = None,
    cap: float | None = None,
    ahead: bool = False,
) -> ChunkAttention:
    """Return the attention of a few queries.

    Args:
        q: scaled queries; query head h reads KV head h // (h / k).
        near: rows at hand; every query sees at least one of them.
        prior: further rows, read in blocks; all queries see them if they are within the window.
        window: number of tokens, including itself, that a token attends to; None for all prior.
        ahead: whether a block is read during attention to the one before.
    """
    b, c, h, d = q.shape
    k = near[0].keys.shape[1]
    whole_rows = prior.side_by_side and c * h // k <= MOST_COLUMNS
    grouped = q.reshape(b, c, k, h // k, d).transpose(0, 2, 4, 1, 3).reshape(b, k, d, -1)

    def seen(block: Block) -> Seen:
        visible = (block.positions < NOWHERE)[:, :, None]
        if window is not None:
            visible &= positions[:, None] - block.positions[:, :, None] < window
        return Seen(block.keys, block.values, visible)

    def visit(number: Array, state: Softmax) -> Softmax:
        return _update(state, grouped, seen(prior.block(number)), cap, whole_rows)

    def visit_whole(number: Array, state: Softmax) -> Softmax:
        return _update(state, grouped, Seen(*prior.rows(number), None), cap, whole_rows)

    def visit_ahead(number: Array, carry: tuple[Softmax, Block]) -> tuple[Softmax, Block]:
        state, block = carry
        following = prior.block(number + 1)
        return _update(state, grouped, seen(block), cap), following

    state = start_softmax(grouped.swapaxes(2, 3))
    for rows in near:
        state = _update(state, grouped, rows, cap)
    first = jnp.int32(0)
    if ahead:
        state, _ = lax.fori_loop(first, prior.blocks, visit_ahead, (state, prior.block(first)))
    else:
        whole = first if window is not None else prior.whole_blocks
        state = lax.fori_loop(first, whole, visit_whole, state)
        state = lax.fori_loop(whole, prior.blocks, visit, state)
    output = (state.weighted / state.total[..., None]).astype(q.dtype)
    log_sum = (state.peak + jnp.log(state.total))[..., None]
    return ChunkAttention(_ungrouped(output, c), _ungrouped(log_sum, c)[..., 0])


def _ungrouped(x: Float[Array, "b k m d"], c: int) -> Float[Array, "b c h d"]:
    b, k, m, d = x.shape
    return x.reshape(b, k, c, m // c, d).transpose(0, 2, 1, 3, 4).reshape(b, c, -1, d)


def _update(
    state: Softmax,
    grouped: Float[Array, "b k d m"],
    rows: Seen,
    cap: float | None,
    whole_rows: bool = False,
) -> Softmax:
    """Attend to further rows; `whole_rows` takes keys and values side by side, as stored.

    Rows lead in the scores: a product that reads keys in their order needs no transposed copy.
    """
    keys, values = rows.keys, rows.values
    if whole_rows:
        keys = values = jnp.concatenate([keys, values], axis=-1)
        grouped = jnp.concatenate([grouped, jnp.zeros_like(grouped)], axis=2)
    scores = jnp.einsum("bknd,bkdm->bknm", keys, grouped, preferred_element_type=jnp.float32)
    scores, visible = soft_capped(scores, cap), rows.visible
    if visible is not None:
        visible = jnp.repeat(visible, grouped.shape[-1] // visible.shape[-1], axis=-1)[:, None]
        scores = jnp.where(visible, scores, MASKED)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=2))
    kept = jnp.exp(state.peak - peak)
    weights = jnp.exp(scores - peak[:, :, None])
    if visible is not None:
        weights = jnp.where(visible, weights, 0.0)
    added = jnp.einsum(
        "bknm,bknd->bkmd",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )[..., -state.weighted.shape[-1] :]
    total = state.total * kept + jnp.sum(weights, axis=2)
    return Softmax(peak, total, state.weighted * kept[..., None] + added)
