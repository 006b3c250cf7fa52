"""Attention of a layer whose cache is on the host, over resident and fetched rows.

A layer that selects nothing attends to all rows, streamed block by block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from infinigen_jax.cache import pool
from infinigen_jax.cache.cache import HostLayer
from infinigen_jax.cache.host_array import (
    ROWS_SPEC,
    capacity_of,
    gather_items,
    gather_rows,
    read_block,
    sharded,
)
from infinigen_jax.cache.layers import Resident
from infinigen_jax.cuda import calls
from infinigen_jax.decode.layout import Layout
from infinigen_jax.decode.requested_attention import attend_requested
from infinigen_jax.decode.state import Counts, Fetched
from infinigen_jax.ops.attention import (
    Part,
    Tail,
    attend_weighted,
    finish_softmax,
    join_softmax,
    packed,
    softmax_over,
)
from infinigen_jax.policies.base import Attended
from infinigen_jax.selection.select import Request
from infinigen_jax.speculation.query import mean_score
from infinigen_jax.speculation.tail import predicted

STREAM_BLOCK = 1024  # tokens of a streamed block


def attend_fetched(
    layout: Layout,
    q: Float[Array, "b k g d"],
    fetched: Fetched,
    host: Shaped[Array, "l a k t w"],
    local: Resident,
    host_layer: HostLayer,
    positions: Int[Array, " b"],
) -> tuple[Float[Array, "b k g d"], Attended | None]:
    """Attend to the resident and the fetched rows.

    Returns:
        The output, and the attention weights for a policy that observes them.
    """
    resident = local.part(positions, layout.slots)
    if layout.in_chunks:
        return attend_chunks(layout, q, resident, fetched, host, local, host_layer, positions), None
    request = fetched.request
    part, cap = fetched_part(layout, fetched, host, host_layer), layout.config.attention_softcap
    taken = part.taken(q.shape[-1])
    tail = tail_term(layout, q, request, taken, local, host_layer, positions)
    if layout.attends_by_kernel:
        attend = functools.partial(calls.attend_rows, cap=cap)
        softmax = sharded(attend, layout.mesh, (ROWS_SPEC,) * 3, ROWS_SPEC)(
            q, fetched.rows, request.count
        )
        return finish_softmax(join_softmax(softmax_over(q, resident, cap), softmax), q, tail), None
    o, (near, far) = attend_weighted(q, resident, part, tail=tail, cap=cap)
    if not layout.policy.observes:
        return o, None
    places = layout.slots.positions(positions)
    return o, Attended(q, request.slots, jnp.sum(far, axis=2), places, jnp.sum(near, axis=2))


def attend_chunks(
    layout: Layout,
    q: Float[Array, "b k g d"],
    resident: Part,
    fetched: Fetched,
    host: Shaped[Array, "l a k t w"],
    local: Resident,
    host_layer: HostLayer,
    positions: Int[Array, " b"],
) -> Float[Array, "b k g d"]:
    """Attend to the resident and the fetched rows, in proportion to the number of valid rows."""

    def read(head: Array, place: Array, slots: Array) -> Array:
        if fetched.rows is None:
            rows = gather_items(host, host_layer.number, head, slots, q.shape[0])
        else:
            rows = fetched.rows.reshape(-1, *fetched.rows.shape[2:])[head[:, None], place][None]
        scales = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[head][None], host_layer.scales)
        return layout.row_format.decode(scales, rows)

    one_mean = not layout.slots.tail_block and fetched.request.rest is not None
    cap = layout.config.attention_softcap
    softmax, taken = attend_requested(q, fetched.request, read, one_mean, cap)
    softmax = join_softmax(softmax_over(q, resident, cap), softmax)
    term = tail_term(layout, q, fetched.request, taken, local, host_layer, positions)
    return finish_softmax(softmax, q, term)


def fetched_part(
    layout: Layout, fetched: Fetched, host: Shaped[Array, "l a k t w"], host_layer: HostLayer
) -> Part:
    """Return all rows of a request as a part for attention."""
    rows = fetched.rows
    if rows is None:
        rows = gather_rows(host, host_layer.number, fetched.request.slots, layout.mesh)
    rows = layout.row_format.decode(host_layer.scales, rows)
    if fetched.rows is not None and (layout.transfer.concurrent or layout.transfer.in_place):
        # Padding may hold NaN, which a weight of 0 does not mask.
        rows = jnp.where(fetched.request.valid[..., None], rows, 0)
    return packed(rows, fetched.request.valid)


def tail_term(
    layout: Layout,
    q: Float[Array, "b k g d"],
    request: Request,
    taken: Float[Array, "b k d"] | None,
    local: Resident,
    host_layer: HostLayer,
    positions: Int[Array, " b"],
) -> Tail | None:
    """Return host-only rows that were not fetched as one token, if the policy has a tail.

    Args:
        taken: sum of the fetched values; used by a tail of one mean.
    """
    if layout.slots.tail_block:
        return tail_blocks(layout, q, request, local, host_layer, positions)
    if request.rest is None:
        return None
    assert local.left is not None and taken is not None
    weights = host_layer.weights
    assert weights is not None
    # Capped scores already have the mean key's logit.
    mean = None if "softcap" in weights else weights.get("mean")
    score = request.rest.score + mean_score(mean, q)
    host_rows = jnp.maximum(positions - layout.policy.window + 1 - layout.policy.sinks, 0)[:, None]
    if (rows := held(layout, host_layer.positions, positions)) is not None:
        host_rows = jnp.sum(rows >= 0, axis=-1, dtype=jnp.int32)
    missing = (host_rows - request.count)[..., None]
    score = jnp.where((missing > 0)[..., None], score, -jnp.inf)
    return Tail(score, local.left - taken[:, :, None], missing)


def tail_blocks(
    layout: Layout,
    q: Float[Array, "b k g d"],
    request: Request,
    local: Resident,
    host_layer: HostLayer,
    positions: Int[Array, " b"],
) -> Tail:
    """Return host-only rows that were not fetched as one token per block.

    The scores come from the layer's own query. A block's value is the mean over all host-only
    tokens of the block, fetched or not, plus the correction that the policy predicts from the index
    entries of the tokens that were not fetched (`speculation.tail`).
    """
    assert local.left is not None
    with jax.named_scope("tail"):
        weights, rest = host_layer.weights, request.rest
        assert weights is not None
        if rest is None:
            rest = layout.policy.own_rest(weights, host_layer.state, q, request, positions)
        blocks = rest.score.shape[3]
        eligible = layout.slots.eligible(positions, blocks * layout.policy.tail_block)
        by_block = eligible.reshape(-1, 1, blocks, layout.policy.tail_block)
        count = jnp.sum(by_block, axis=-1, dtype=jnp.int32)
        shift = None if rest.entry is None else predicted(weights, rest.entry)
        return Tail(rest.score, local.left, count, shift)


def held(
    layout: Layout, rows: Int[Array, "b k t"] | None, positions: Int[Array, " b"]
) -> Int[Array, "b k t"] | None:
    """Return positions of a pool's rows that only the host has; None without a pool."""
    return None if rows is None else pool.held(rows, positions, layout.policy.window)


def on_host_only(
    layout: Layout, host_layer: HostLayer, capacity: int, positions: Int[Array, " b"]
) -> Bool[Array, "b kv t"]:
    """Return slots whose rows only the host has, per KV head or, with kv = 1, for all heads."""
    if (rows := held(layout, host_layer.positions, positions)) is not None:
        return rows >= 0
    return layout.slots.eligible(positions, capacity)[:, None]


def attend_streamed(
    layout: Layout,
    q: Float[Array, "b k g d"],
    local: Resident,
    host: Shaped[Array, "l a k t w"],
    host_layer: HostLayer,
    positions: Int[Array, " b"],
) -> Float[Array, "b k g d"]:
    """Attend to the resident rows and all rows on the host, block by block."""
    cap, capacity = layout.config.attention_softcap, capacity_of(host, q.shape[0])
    block = min(capacity, STREAM_BLOCK)
    eligible = on_host_only(layout, host_layer, capacity, positions)
    # With a pool the capacity need not be a multiple of the block. The last read then starts early
    # and overlaps the previous block; the rows read again are masked.
    blocks = -(-capacity // block)

    def visit(i: Array, state: Any) -> Any:
        start = i * block
        if capacity % block:
            start = jnp.minimum(start, capacity - block)
        valid = lax.dynamic_slice_in_dim(eligible, start, block, axis=2)
        if capacity % block:
            repeated = jnp.arange(block, dtype=jnp.int32) < i * block - start
            valid = valid & ~repeated[None, None]
        rows = read_block(host, host_layer.number, start, block, layout.mesh, q.shape[0])
        # Unwritten slots may hold NaN, which a weight of 0 does not mask.
        rows = jnp.where(valid[..., None], layout.row_format.decode(host_layer.scales, rows), 0)
        return join_softmax(state, softmax_over(q, packed(rows, valid), cap))

    state = softmax_over(q, local.part(positions, layout.slots), cap)
    state = lax.fori_loop(jnp.int32(0), jnp.int32(blocks), visit, state)
    return finish_softmax(state, q)


def count_streamed(
    layout: Layout,
    counts: Counts,
    capacity: int,
    host_layer: HostLayer,
    positions: Int[Array, " b"],
) -> Counts:
    """Add all host-only rows of one layer to the counts."""
    host_rows = on_host_only(layout, host_layer, capacity, positions)
    rows = jnp.sum(host_rows, axis=(1, 2), dtype=jnp.int32)
    rows = rows * (layout.config.num_kv_heads // host_rows.shape[1])
    return Counts(counts.selected + rows, counts.moved + rows)
