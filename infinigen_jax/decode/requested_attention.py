"""Attention to requested rows in proportion to their number, where host and device share memory.

KV heads request very different numbers of rows. The valid rows are therefore cut into work items
(`ops.work_items`). A loop reads some items and attends to them while they are in the CPU's cache.
A head's items are combined in a fixed order: a sequence's sums do not depend on the others.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from infinigen_jax.ops.attention import Softmax, join_parts, packed, softmax_over, start_softmax
from infinigen_jax.ops.barriers import compute_once
from infinigen_jax.ops.compaction import mark_starts, marks_at, running_counts
from infinigen_jax.ops.work_items import cut_items, items_at_once, most_items
from infinigen_jax.selection.select import Request

# Reads the rows of some work items, given the KV head of each item (sequences and KV heads counted
# together), its places in the request, and its slots.
Read = Callable[[Int[Array, " p"], Int[Array, "p c"], Int[Array, "p c"]], Float[Array, "1 p c w"]]


def attend_requested(
    q: Float[Array, "b k g d"],
    request: Request,
    read: Read,
    sums: bool,
    cap: float | None = None,
) -> tuple[Softmax, Float[Array, "b k d"] | None]:
    """Return attention to a request's valid rows, and with `sums` the sum of their values.

    If the request has marks, slots are computed from them when read. XLA then drops the request's
    own slots if selection and attention are in one program.
    """
    b, k, g, d = q.shape
    heads, n = b * k, request.slots.shape[2]
    count = request.count.reshape(heads)
    items, most = cut_items(count), most_items(n)
    at_once = items_at_once(heads, most)
    room = heads * most + at_once
    queries = q.reshape(heads, g, d)
    if request.marks is None:
        slots = request.slots.reshape(heads, n)
    else:
        marks = request.marks.reshape(heads, -1)
        starts = mark_starts(marks, running_counts(marks), count, items, room)

    def find(i: Array, head: Array, place: Array, valid: Array) -> Array:
        if request.marks is None:
            return slots[head[:, None], place]

        def search() -> Array:
            slots_of_items = marks_at(
                marks, lax.dynamic_slice_in_dim(starts, i * at_once, at_once), head
            )
            return jnp.where(valid, slots_of_items, 0)  # beyond the count

        return compute_once(search)

    def visit(i: Array, results: Any) -> Any:
        head, place = items.places(i, at_once)
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

    taken = jnp.zeros((room, d), jnp.float32) if sums else None
    empty = start_softmax(jnp.zeros((1, room, g, d), q.dtype))
    results: Any = jax.tree.map(lambda x: x[0], empty), taken
    results = lax.fori_loop(jnp.int32(0), items.loops(at_once), visit, results)
    place = jnp.arange(most, dtype=jnp.int32)[None]
    valid_items = place < items.counts[:, None]
    place = jnp.where(valid_items, items.begin[:, None] + place, 0)
    parts, taken = jax.tree.map(lambda x: x[place].reshape(b, k, most, *x.shape[1:]), results)
    valid_items = valid_items.reshape(b, k, most)
    if sums:
        taken = jnp.sum(jnp.where(valid_items[..., None], taken, 0.0), axis=2)
    return join_parts(parts, valid_items), taken
