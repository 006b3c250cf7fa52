"""Attention to requested rows where the host's memory is the device's: as many as are meant.

KV heads want very different numbers of rows, and a request has room for the most that any may have.
So what is meant is cut into jobs (`jobs`), and JOBS of them are read and attended to at a time,
whichever heads they are of: they stay in the CPU's cache. A head's jobs are put together at the
end, always in the same order, so that no sequence's sums depend on another's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.ops.attention import Softmax, extend_softmax, packed, start_softmax
from infinigen_jax.ops.barriers import apart
from infinigen_jax.ops.compaction import mark_starts, marks_at, running_counts
from infinigen_jax.ops.work_items import JOBS, cut, most_jobs
from infinigen_jax.selection.select import Request

# The rows of some jobs: given each one's KV head (sequences and KV heads counted together), its
# places in the request, and its slots.
Read = Callable[[Int[Array, " p"], Int[Array, "p c"], Int[Array, "p c"]], Float[Array, "1 p c w"]]


def attend_requested(
    q: Float[Array, "b k g d"], request: Request, read: Read, sums: bool
) -> tuple[Softmax, Float[Array, "b k d"] | None]:
    """Attention to the rows that a request means, and with `sums` the sum of their values.

    Their slots are found by the request's marks where it has them, each where it is read, so that
    the request's own need not be made where selection and attention are in one program.
    """
    b, k, g, d = q.shape
    heads, n = b * k, request.slots.shape[2]
    count = request.count.reshape(heads)
    jobs, most = cut(count), most_jobs(n)
    room = heads * most + JOBS
    queries = q.reshape(heads, g, d)
    if request.marks is None:
        slots = request.slots.reshape(heads, n)
    else:
        marks = request.marks.reshape(heads, -1)
        starts = mark_starts(marks, running_counts(marks), count, jobs, room)

    def find(i: Array, head: Array, place: Array, meant: Array) -> Array:
        if request.marks is None:
            return slots[head[:, None], place]

        def search() -> Array:
            found = marks_at(marks, lax.dynamic_slice_in_dim(starts, i * JOBS, JOBS), head)
            return jnp.where(meant, found, 0)  # any behind what is meant

        return apart(search)

    def visit(i: Array, made: Any) -> Any:
        head, place = jobs.places(i, JOBS)
        meant = place < count[head][:, None]
        place = jnp.minimum(place, n - 1)
        part = packed(read(head, place, find(i, head, place, meant)), meant[None])
        query = queries[head][None]
        found = extend_softmax(start_softmax(query), query, part)
        return jax.tree.map(
            lambda kept, new: lax.dynamic_update_slice_in_dim(kept, new[0], i * JOBS, axis=0),
            made,
            (found, part.taken(d) if sums else None),
        )

    taken = jnp.zeros((room, d), jnp.float32) if sums else None
    nothing = start_softmax(jnp.zeros((1, room, g, d), q.dtype))
    made: Any = jax.tree.map(lambda x: x[0], nothing), taken
    made = lax.fori_loop(jnp.int32(0), jobs.loops(JOBS), visit, made)
    place = jnp.arange(most, dtype=jnp.int32)[None]
    there = place < jobs.number[:, None]
    place = jnp.where(there, jobs.begin[:, None] + place, 0)
    parts, taken = jax.tree.map(lambda x: x[place].reshape(b, k, most, *x.shape[1:]), made)
    there = there.reshape(b, k, most)
    if sums:
        taken = jnp.sum(jnp.where(there[..., None], taken, 0.0), axis=2)
    return _together(parts, there), taken


def _together(parts: Softmax, there: Bool[Array, "b k m"]) -> Softmax:
    """One softmax of the m that are there."""
    there = there[..., None]
    peaks = jnp.where(there, parts.peak, jnp.min(parts.peak))
    peak = jnp.max(peaks, axis=2)
    kept = jnp.where(there, jnp.exp(peaks - peak[:, :, None]), 0.0)
    return Softmax(
        peak,
        jnp.sum(parts.total * kept, axis=2),
        jnp.einsum("bkmgd,bkmg->bkgd", parts.weighted, kept),
    )
