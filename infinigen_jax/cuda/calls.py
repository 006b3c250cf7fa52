"""Kernels as traced functions of one device's arrays; callers wrap most in `jax.shard_map`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from infinigen_jax.cuda.launch import call
from infinigen_jax.errors import ParameterError
from infinigen_jax.ops.attention import Softmax, join_parts
from infinigen_jax.selection.select import Rest

VECTOR = 16  # bytes that a lane moves in one instruction
MAX_GROUP = 128  # as in select.cu
SHARE = 128  # rows that a block attends to, as in attend.cu
MAX_HEAD = 256  # columns of a key, as in attend.cu
ATTEND_THREADS = 128
THREADS = 1024  # threads per block; a block works on one (b, k)
# Of the kernels that score an index:
SCORE_THREADS = 256
WARPS = SCORE_THREADS // 32
TILE = 32  # slots of a warp at a time, as in score.cu
BLOCKS = 1024  # of a launch, about: twice as many as run at a time on an H100
MAX_SHARE = 16384  # slots of a block, as in score.cu
MAX_COLUMNS = 256  # as in score.cu
LEADING = (8, 16)  # numbers of columns that the kernel can average
TAIL_BLOCKS = (32, 64, 128)  # slots per number of `index_rest`


def on_each_device(local: Callable[..., Any], placed: Array, *arrays: Array) -> Any:
    """Call on each device's part of arrays [b, ...] and [b, k, ...], on the mesh of `placed`."""
    mesh = jax.typeof(placed).sharding.mesh
    if mesh.empty or mesh.size == 1:
        return local(*arrays)
    specs = tuple(PartitionSpec(*("data", "model")[: x.ndim]) for x in arrays)
    out = PartitionSpec("data", "model")
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(*arrays)


def gather(
    host: Shaped[Array, "l a k t w"],
    layer: Int[Array, ""],
    slots: Int[Array, "b k n"],
    count: Int[Array, "b k"],
    hot: Shaped[Array, "b k h w"] | None = None,
    entry: Int[Array, "b k n"] | None = None,
    miss: Bool[Array, "b k n"] | None = None,
    *,
    blocks: int,
    threads: int,
) -> tuple[Shaped[Array, "b k n w"], Shaped[Array, "b k h w"] | None]:
    """Gather the `count` valid rows of a layer from pinned memory during other work. See gather.cu.

    Slots are numbered by `cache.host_array.kernel_slots`; rows after the valid ones are undefined.
    `hot` are the hot set's rows, updated in place if donated; `entry` and `miss` its replacement.
    """
    t, w = host.shape[3:]
    b, k, n = slots.shape
    size = w * host.dtype.itemsize
    if size % VECTOR:
        problem = f"rows of {size} bytes; they must be multiples of 16"
        raise ParameterError("transfer", problem, "cuda")
    vectors = size // VECTOR
    total = b * k * n * vectors
    if total >= 2**31:
        problem = "a request of 32 GiB or more; use a smaller `budget`"
        raise ParameterError("transfer", problem, "cuda")
    rows = jax.ShapeDtypeStruct((b, k, n, w), host.dtype)
    grid = (min(blocks, -(-total // threads)), threads)
    integers = (b * k, t, n, vectors)
    operands = (host, layer, slots, count)
    if hot is None:
        (moved,) = call("gather_rows", operands, (rows,), grid, integers, concurrent=True)
        return moved, None
    assert entry is not None and miss is not None
    results = rows, jax.ShapeDtypeStruct(hot.shape, hot.dtype)
    launch = (*operands, hot, entry, miss), results, grid, (*integers, hot.shape[2])
    moved, hot = call("gather_rows_hot", *launch, aliases={4: 1}, concurrent=True)
    return moved, hot


def attends(dtype: jnp.dtype, head_dim: int) -> bool:
    """Return whether `attend_rows` reads rows of this dtype and head size."""
    return dtype == jnp.bfloat16 and head_dim % 8 == 0 and head_dim <= MAX_HEAD


def attend_rows(
    q: Float[Array, "b k g d"],
    rows: Shaped[Array, "b k n w"],
    count: Int[Array, "b k"],
    cap: float | None,
) -> Softmax:
    """Attend to the first `count` rows of a request, if `attends` holds for them. See attend.cu."""
    b, k, g, d = q.shape
    n = rows.shape[2]
    shares = -(-n // SHARE)
    heads = jax.ShapeDtypeStruct((b, k, shares, g), jnp.float32)
    columns = jax.ShapeDtypeStruct((b, k, shares, g, d), jnp.float32)
    parts = call(
        "attend_rows",
        (q.astype(jnp.float32), rows, count),
        (heads, heads, columns),
        (b * k * shares, ATTEND_THREADS),
        (g, n, d, shares, int(np.float32(cap or 0).view(np.int32))),
    )
    return join_parts(Softmax(*parts))


def select_rows(
    scores: Float[Array, "b k g t"],
    positions: Int[Array, " b"],
    most: Int[Array, " b"],
    size: int,
    alpha: float,
    sinks: int,
    window: int,
) -> tuple[Int[Array, "b k n"], Int[Array, "b k"]]:
    """Return the slots of the rows to fetch, ascending and padded with 0, and their count.

    On several devices each selects for its own sequences and heads. `scores` are speculated logits,
    float32, `most` the rows that the budget allows each sequence; `alpha` may be `inf`. See
    `selection.select` and select.cu.
    """

    def local(scores: Array, positions: Array, most: Array) -> tuple[Array, Array]:
        b, k, g, t = scores.shape
        slots, count, _ = call(
            "select_rows",
            (scores, positions, most),
            (
                jax.ShapeDtypeStruct((b, k, size), jnp.int32),
                jax.ShapeDtypeStruct((b, k), jnp.int32),
                jax.ShapeDtypeStruct((b, k, 2, t), jnp.uint32),
            ),
            (b * k, THREADS),
            (k, g, t, size, sinks, window, int(np.float32(alpha).view(np.int32))),
        )
        return slots, count

    return on_each_device(local, scores, scores, positions, most)


def replace_entries(
    slots: Int[Array, "b k n"],
    count: Int[Array, "b k"],
    positions: Int[Array, " b"],
    hot_slots: Int[Array, "b k h"],
    used: Int[Array, "b k h"],
    place: Int[Array, "b k t"],
) -> tuple[Array, Array, Array, Array, Array]:
    """Return entries, misses, and the next directory: slots, used, place. See replace.cu."""
    b, k, n = slots.shape
    directory = (hot_slots, used, place)
    like = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in directory)
    entries = jax.ShapeDtypeStruct(slots.shape, jnp.int32)
    misses = jax.ShapeDtypeStruct(slots.shape, jnp.bool_)
    scratch = jax.ShapeDtypeStruct(hot_slots.shape, jnp.uint32), entries
    entry, miss, hot_slots, used, place, *_ = call(
        "replace_entries_16" if place.dtype == jnp.int16 else "replace_entries_32",
        (slots, count, positions, *directory),
        (entries, misses, *like, *scratch),
        (b * k, THREADS),
        (k, n, hot_slots.shape[2], place.shape[2]),
        aliases={3: 2, 4: 3, 5: 4},
    )
    return entry, miss, hot_slots, used, place


def index_scores(
    query: Float[Array, "b k g r"], index: UInt32[Array, "b k e t"]
) -> Float[Array, "b k g t"]:
    """Return the scores of all slots, for float32 queries of at most MAX_COLUMNS columns."""

    def local(query: Array, index: Array) -> Array:
        b, k, g, _ = query.shape
        out = jax.ShapeDtypeStruct((b, k, g, index.shape[3]), jnp.float32)
        return _launch("index_scores", (query, index), (out,), TILE, (g,))[0]

    return on_each_device(local, index, query, index)


def index_rest(
    query: Float[Array, "b k g r"],
    index: UInt32[Array, "b k e t"],
    positions: Int[Array, " b"],
    slots: Int[Array, "b k n"],
    count: Int[Array, "b k"],
    blocks: int,
    sinks: int,
    window: int,
    columns: int = 0,
) -> Rest:
    """Compute `selection.select.log_rest` without storing the scores.

    Slots from `sinks` to position - `window` count, except the requested ones. A block has t / m
    slots, one of TAIL_BLOCKS. `columns` is c of `Rest.entry`, at most the last of LEADING; 0 for
    none.
    """
    leading = min((n for n in LEADING if n >= columns), default=0) if columns else 0

    def local(query: Array, index: Array, *others: Array) -> tuple[Array, ...]:
        b, k, g, _ = query.shape
        tail_block, size = index.shape[3] // blocks, others[1].shape[2]
        score = jax.ShapeDtypeStruct((b, k, g, blocks), jnp.float32)
        # The kernel needs a pointer even if it does not write there.
        entry = jax.ShapeDtypeStruct((b, k, g, blocks if leading else 1, leading or 1), jnp.float32)
        arrays, after = (query, index, *others), (size, tail_block, sinks, window, leading)
        return _launch("index_rest", arrays, (score, entry), tail_block, (k, g), after)

    score, entry = on_each_device(local, index, query, index, positions, slots, count)
    if not columns:
        return Rest(score)
    shares = jax.nn.softmax(jnp.maximum(score, jnp.finfo(jnp.float32).min), axis=-1)
    return Rest(score, jnp.einsum("bkgm,bkgmc->bkgc", shares, entry[..., :columns]))


def _launch(
    kernel: str,
    operands: tuple[Array, ...],
    outs: tuple[jax.ShapeDtypeStruct, ...],
    warp_slots: int,
    before: tuple[int, ...],
    after: tuple[int, ...] = (),
) -> tuple[Array, ...]:
    """Launch with the integers `before`, columns, words of codes, capacity, share, and `after`.

    A block's share of slots is whole turns of its warps. Every block prepares the query, so blocks
    are as large as BLOCKS and MAX_SHARE allow.
    """
    columns, (b, k, words, capacity) = operands[0].shape[3], operands[1].shape
    turn = WARPS * warp_slots
    turns = -(-capacity * b * k // (BLOCKS * turn))
    share = turn * min(max(1, turns), MAX_SHARE // turn)
    integers = (*before, columns, words - 1, capacity, share, *after)
    grid = (b * k * -(-capacity // share), SCORE_THREADS)
    return call(kernel, operands, outs, grid, integers)
