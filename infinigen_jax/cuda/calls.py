"""Kernels as traced functions of one device's arrays; callers wrap most in `jax.shard_map`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from infinigen_jax.cuda.launch import call
from infinigen_jax.errors import ParameterError
from infinigen_jax.ops.attention import Softmax, join_parts

VECTOR = 16  # bytes that a lane moves in one instruction
MAX_GROUP = 128  # as in select.cu
SHARE = 128  # rows that a block attends to, as in attend.cu
MAX_HEAD = 256  # columns of a key, as in attend.cu
ATTEND_THREADS = 128
THREADS = 1024  # threads per block; a block works on one (b, k)


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
        raise ParameterError(
            "transfer", f"rows of {size} bytes; they must be multiples of 16", "cuda"
        )
    vectors = size // VECTOR
    total = b * k * n * vectors
    if total >= 2**31:
        raise ParameterError(
            "transfer", "a request of 32 GiB or more; use a smaller `budget`", "cuda"
        )
    rows = jax.ShapeDtypeStruct((b, k, n, w), host.dtype)
    grid = (min(blocks, -(-total // threads)), threads)
    integers = (b * k, t, n, vectors)
    operands = (host, layer, slots, count)
    if hot is None:
        (moved,) = call("gather_rows", operands, (rows,), grid, integers, concurrent=True)
        return moved, None
    assert entry is not None and miss is not None
    results = rows, jax.ShapeDtypeStruct(hot.shape, hot.dtype)
    operands, integers = (*operands, hot, entry, miss), (*integers, hot.shape[2])
    moved, hot = call(
        "gather_rows_hot", operands, results, grid, integers, aliases={4: 1}, concurrent=True
    )
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
    """Attend to the first `count` rows of a request; the others are not read. See attend.cu.

    `attends` must hold for the rows' dtype and the head size.
    """
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

    On several devices each selects for its own sequences and heads. See select.cu.

    Args:
        scores: speculated logits, float32.
        most: number of rows that the budget allows each sequence.
        alpha: largest distance of a selected score below the best one (section 4.3); may be `inf`.
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
    """Return entries, misses, and the hot set's next directory: slots, used, place. See replace.cu.

    A donated directory is updated in place.
    """
    b, k, n = slots.shape
    directory = (hot_slots, used, place)
    like = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in directory)
    replacement = (
        jax.ShapeDtypeStruct((b, k, n), jnp.int32),
        jax.ShapeDtypeStruct((b, k, n), jnp.bool_),
    )
    scratch = (
        jax.ShapeDtypeStruct(hot_slots.shape, jnp.uint32),
        jax.ShapeDtypeStruct((b, k, n), jnp.int32),
    )
    entry, miss, hot_slots, used, place, *_ = call(
        "replace_entries_16" if place.dtype == jnp.int16 else "replace_entries_32",
        (slots, count, positions, *directory),
        (*replacement, *like, *scratch),
        (b * k, THREADS),
        (k, n, hot_slots.shape[2], place.shape[2]),
        aliases={3: 2, 4: 3, 5: 4},
    )
    return entry, miss, hot_slots, used, place
