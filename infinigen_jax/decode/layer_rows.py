"""Cached rows of one layer in a decode step: all on the device, or most of them on the host.

Both kinds have the same methods, so that `Decoder.decode_layer` treats them alike:

    write(key, value)    add the rows of the current tokens
    near()               rows on the device, for a guess that waits for no transfer
    attend(q, carry)     attention over all rows that the layer attends to

A layer on the host attends to its resident and its fetched rows, or if it selects nothing to all
rows, streamed block by block.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from infinigen_jax.cache.cache import HostLayer
from infinigen_jax.cache.host_array import (
    ROWS_SPEC,
    capacity_of,
    gather_items,
    gather_rows,
    read_block,
    sharded,
)
from infinigen_jax.cache.layers import DenseLayer, Resident, Sliding
from infinigen_jax.cache.pool import held
from infinigen_jax.cuda import calls
from infinigen_jax.decode.layout import Layout
from infinigen_jax.decode.state import Carry, Counts, Fetched, LayerInputs, LayerState
from infinigen_jax.ops import compaction
from infinigen_jax.ops.attention import (
    Part,
    Softmax,
    Tail,
    attend,
    attend_weighted,
    finish_softmax,
    join_parts,
    join_softmax,
    packed,
    softmax_over,
    start_softmax,
)
from infinigen_jax.ops.barriers import compute_once
from infinigen_jax.ops.used_slots import over_used
from infinigen_jax.policies.base import Attended
from infinigen_jax.selection.select import Request
from infinigen_jax.speculation.query import mean_score
from infinigen_jax.speculation.tail import predicted

STREAM_BLOCK = 1024  # tokens of a streamed block
# Reads the rows of some work items, given the KV head of each item (sequences and KV heads counted
# together), its places in the request, and its slots.
Read = Callable[[Int[Array, " p"], Int[Array, "p c"], Int[Array, "p c"]], Float[Array, "1 p c w"]]


class DeviceRows(NamedTuple):
    """Rows of a layer that are all on the device."""

    layout: Layout
    local: DenseLayer | Sliding
    positions: Int[Array, " b"]
    observed: Any = None

    def write(self, key: Float[Array, "b k d"], value: Float[Array, "b k d"]) -> "DeviceRows":
        return self._replace(local=self.local.write(key, value, self.positions))

    def near(self) -> Part:
        return self.local.near(self.positions, self.layout.slots, self.layout.dtype)

    def attend(
        self, q: Float[Array, "b k g d"], carry: Carry
    ) -> tuple[Float[Array, "b k g d"], "DeviceRows", Counts]:
        part = self.local.part(self.positions, self.layout.dtype)
        cap = self.layout.config.attention_softcap

        def attend_first(slots: int) -> Array:
            return attend(q, Part(*(x[:, :, :slots] for x in part)), cap=cap)

        used, capacity = jnp.max(self.positions) + 1, part.keys.shape[2]
        o = over_used(attend_first, used, capacity, self.layout.exceeded)
        return o, self, carry.counts


class HostRows(NamedTuple):
    """Rows of a layer on the host; sinks and recent tokens are also on the device."""

    layout: Layout
    local: Resident
    positions: Int[Array, " b"]
    observed: Any
    host: Shaped[Array, "l a k t w"]
    place: HostLayer

    def write(self, key: Float[Array, "b k d"], value: Float[Array, "b k d"]) -> "HostRows":
        summed = self.layout.summed(self.place.weights or {})
        local = self.local.write(key, value, self.positions, self.layout.slots, summed)
        return self._replace(local=local)

    def near(self) -> Part:
        return self.local.part(self.positions, self.layout.slots)

    def attend(
        self, q: Float[Array, "b k g d"], carry: Carry
    ) -> tuple[Float[Array, "b k g d"], "HostRows", Counts]:
        if carry.fetched is None:
            return self._attend_streamed(q), self, self._count_streamed(carry.counts)
        o, attended = self._attend_fetched(q, carry.fetched)
        if attended is None:
            return o, self, carry.counts
        policy = self.layout.policy
        observed = policy.observe(self.observed, attended)
        policy.check_observed(observed, self.observed)
        return o, self._replace(observed=observed), carry.counts

    def _attend_fetched(
        self, q: Float[Array, "b k g d"], fetched: Fetched
    ) -> tuple[Float[Array, "b k g d"], Attended | None]:
        """Attend to resident and fetched rows; also return the weights if the policy observes."""
        layout, request = self.layout, fetched.request
        if layout.in_chunks:
            return self._attend_chunks(q, fetched), None
        resident, part = self.near(), self.fetched_part(fetched)
        cap = layout.config.attention_softcap
        tail = self.tail_term(q, request, part.taken(q.shape[-1]))
        if layout.attends_by_kernel:
            kernel = functools.partial(calls.attend_rows, cap=cap)
            softmax = sharded(kernel, layout.mesh, (ROWS_SPEC,) * 3, ROWS_SPEC)(
                q, fetched.rows, request.count
            )
            softmax = join_softmax(softmax_over(q, resident, cap), softmax)
            return finish_softmax(softmax, q, tail), None
        o, (near, far) = attend_weighted(q, resident, part, tail=tail, cap=cap)
        if not layout.policy.observes:
            return o, None
        places = layout.slots.positions(self.positions)
        return o, Attended(q, request.slots, jnp.sum(far, axis=2), places, jnp.sum(near, axis=2))

    def _attend_chunks(
        self, q: Float[Array, "b k g d"], fetched: Fetched
    ) -> Float[Array, "b k g d"]:
        """Attend to the resident and the fetched rows, in proportion to the valid ones."""
        layout, place = self.layout, self.place

        def read(head: Array, at: Array, slots: Array) -> Array:
            if fetched.rows is None:
                rows = gather_items(self.host, place.number, head, slots, q.shape[0])
            else:
                rows = fetched.rows.reshape(-1, *fetched.rows.shape[2:])[head[:, None], at][None]
            scales = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[head][None], place.scales)
            return layout.row_format.decode(scales, rows)

        resident = self.near()
        one_mean = not layout.slots.tail_block and fetched.request.rest is not None
        cap = layout.config.attention_softcap
        softmax, taken = attend_requested(q, fetched.request, read, one_mean, cap)
        softmax = join_softmax(softmax_over(q, resident, cap), softmax)
        return finish_softmax(softmax, q, self.tail_term(q, fetched.request, taken))

    def fetched_part(self, fetched: Fetched) -> Part:
        """Return all rows of a request as a part for attention."""
        layout, rows = self.layout, fetched.rows
        if rows is None:
            rows = gather_rows(self.host, self.place.number, fetched.request.slots, layout.mesh)
        rows = layout.row_format.decode(self.place.scales, rows)
        if fetched.rows is not None and (layout.transfer.concurrent or layout.transfer.in_place):
            # Padding may hold NaN, which a weight of 0 does not mask.
            rows = jnp.where(fetched.request.valid[..., None], rows, 0)
        return packed(rows, fetched.request.valid)

    def tail_term(
        self, q: Float[Array, "b k g d"], request: Request, taken: Float[Array, "b k d"] | None
    ) -> Tail | None:
        """Return few tokens that stand for the host-only rows that were not fetched, if requested.

        One mean needs `taken`, the sum of the fetched values. With blocks there is one token per
        block, scored by the layer's own query. Its value is the mean over all host-only tokens of
        the block, fetched or not, plus the correction that the policy predicts from the index
        entries of those not fetched (`speculation.tail`).
        """
        layout, weights, rest = self.layout, self.place.weights, request.rest
        if rest is None and not layout.slots.tail_block:
            return None
        assert self.local.left is not None and weights is not None
        if not layout.slots.tail_block:
            assert rest is not None and taken is not None
            host_rows = jnp.sum(self._on_host_only(), axis=-1, dtype=jnp.int32)
            missing = (host_rows - request.count)[..., None]
            score = jnp.where((missing > 0)[..., None], self._with_mean(rest.score, q), -jnp.inf)
            return Tail(score, self.local.left - taken[:, :, None], missing)
        with jax.named_scope("tail"):
            if rest is None:
                rest = layout.policy.own_rest(weights, self.place.state, q, request, self.positions)
            by_block = self._on_host_only().reshape(len(q), 1, rest.score.shape[3], -1)
            count = jnp.sum(by_block, axis=-1, dtype=jnp.int32)
            shift = None if rest.entry is None else predicted(weights, rest.entry)
            return Tail(self._with_mean(rest.score, q), self.local.left, count, shift)

    def _with_mean(
        self, score: Float[Array, "b k g m"], q: Float[Array, "b k g d"]
    ) -> Float[Array, "b k g m"]:
        """Add the mean key's logit, which capped scores already have."""
        weights = self.place.weights
        assert weights is not None
        mean = None if "softcap" in weights else weights.get("mean")
        return score + mean_score(mean, q)

    def _on_host_only(self) -> Bool[Array, "b kv t"]:
        """Return slots whose rows only the host has, per KV head or, with kv = 1, for all heads."""
        if self.place.positions is not None:
            return held(self.place.positions, self.positions, self.layout.policy.window) >= 0
        capacity = capacity_of(self.host, len(self.positions))
        return self.layout.slots.eligible(self.positions, capacity)

    def _attend_streamed(self, q: Float[Array, "b k g d"]) -> Float[Array, "b k g d"]:
        layout, cap, batch = self.layout, self.layout.config.attention_softcap, q.shape[0]
        capacity, eligible = capacity_of(self.host, batch), self._on_host_only()
        block = min(capacity, STREAM_BLOCK)
        # The capacity of a pool may not be a multiple of the block. The last read then starts early
        # and overlaps the previous block; the rows read again are masked.

        def visit(i: Array, state: Any) -> Any:
            start = i * block
            if capacity % block:
                start = jnp.minimum(start, capacity - block)
            valid = lax.dynamic_slice_in_dim(eligible, start, block, axis=2)
            if capacity % block:
                repeated = jnp.arange(block, dtype=jnp.int32) < i * block - start
                valid = valid & ~repeated[None, None]
            rows = read_block(self.host, self.place.number, start, block, layout.mesh, batch)
            rows = layout.row_format.decode(self.place.scales, rows)
            # Unwritten slots may hold NaN, which a weight of 0 does not mask.
            rows = jnp.where(valid[..., None], rows, 0)
            return join_softmax(state, softmax_over(q, packed(rows, valid), cap))

        state = softmax_over(q, self.near(), cap)
        state = lax.fori_loop(jnp.int32(0), jnp.int32(-(-capacity // block)), visit, state)
        return finish_softmax(state, q)

    def _count_streamed(self, counts: Counts) -> Counts:
        rows = jnp.sum(self._on_host_only(), axis=2, dtype=jnp.int32)
        rows = jnp.broadcast_to(rows, (len(rows), self.layout.config.num_kv_heads))
        return counts.add(rows, rows)


def layer_rows(layout: Layout, inputs: LayerInputs, state: LayerState) -> DeviceRows | HostRows:
    common: Any = layout, state.local, inputs.positions, state.observed
    if inputs.place is None:
        return DeviceRows(*common)
    assert inputs.host is not None
    return HostRows(*common, host=inputs.host, place=inputs.place)


def attend_requested(
    q: Float[Array, "b k g d"],
    request: Request,
    read: Read,
    sums: bool,
    cap: float | None = None,
) -> tuple[Softmax, Float[Array, "b k d"] | None]:
    """Return attention to a request's valid rows, and with `sums` the sum of their values.

    KV heads request very different numbers of rows. The valid rows are therefore cut into work
    items (`ops.compaction`). A loop reads some items and attends to them while they are in the
    CPU's cache. A head's items are combined in a fixed order: a sequence's sums do not depend on
    the others.

    If the request has marks, slots are computed from them when read. XLA then drops the request's
    own slots if selection and attention are in one program.
    """
    b, k, g, d = q.shape
    heads, n = b * k, request.slots.shape[2]
    count = request.count.reshape(heads)
    items = compaction.cut_items(count, n)
    at_once, most = items.at_once, items.most
    queries = q.reshape(heads, g, d)
    if request.marks is None:
        slots = request.slots.reshape(heads, n)
    else:
        marks = request.marks.reshape(heads, -1)
        counts = compaction.running_counts(marks)
        starts = compaction.mark_starts(marks, counts, count, items)

    def find(i: Array, head: Array, place: Array, valid: Array) -> Array:
        if request.marks is None:
            return slots[head[:, None], place]

        def search() -> Array:
            at = lax.dynamic_slice_in_dim(starts, i * at_once, at_once)
            return jnp.where(valid, compaction.marks_at(marks, at, head), 0)  # beyond the count

        return compute_once(search)

    def visit(i: Array, results: Any) -> Any:
        head, place = items.places(i)
        valid = place < count[head][:, None]
        place = jnp.minimum(place, n - 1)
        part = packed(read(head, place, find(i, head, place, valid)), valid[None])
        query = queries[head][None]
        softmax = softmax_over(query, part, cap)
        return jax.tree.map(
            lambda kept, new: lax.dynamic_update_slice_in_dim(kept, new[0], i * at_once, axis=0),
            results,
            (softmax, part.taken(d) if sums else None),
        )

    taken = jnp.zeros((items.room, d), jnp.float32) if sums else None
    empty = start_softmax(jnp.zeros((1, items.room, g, d), q.dtype))
    results: Any = jax.tree.map(lambda x: x[0], empty), taken
    results = lax.fori_loop(jnp.int32(0), items.loops, visit, results)
    place = jnp.arange(most, dtype=jnp.int32)[None]
    valid_items = place < items.counts[:, None]
    place = jnp.where(valid_items, items.begin[:, None] + place, 0)
    parts, taken = jax.tree.map(lambda x: x[place].reshape(b, k, most, *x.shape[1:]), results)
    valid_items = valid_items.reshape(b, k, most)
    if sums:
        taken = jnp.sum(jnp.where(valid_items[..., None], taken, 0.0), axis=2)
    return join_parts(parts, valid_items), taken
