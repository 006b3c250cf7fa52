"""Pinned host memory in JAX: allocating it, reading rows from it, writing rows into it.

A memory kind is part of an array's type, and XLA turns a careless operation on a host array into a
copy of the whole array or into arithmetic over PCIe. The functions here are the ones that do
neither (tests/gpu reads the compiled program), and every access to host memory goes through them.
They run inside `jax.shard_map`, because automatic partitioning of host gathers does not compile;
on the ordinary mesh of one device that costs nothing.

The host cache is one array [l, a, k, t, w]: layers kept on the host, sequences, KV heads, slots,
and a row of width w that holds a token's key and value side by side (w = 2d, or packed bytes).

Along a there are the b sequences, and behind them what all of them begin with, stored once:

    slots of every sequence    0 .. t-1     t .. 2t-1    2t .. 3t-1
    a = b + 2 rows of slots    row b        row b + 1    the sequence's own row

Ordinarily a = b, and a sequence has its t slots to itself. The functions here take a sequence's
slots, from 0, unless they say otherwise; those that write take own ones only.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from infinigen_jax.errors import InputError
from infinigen_jax.ops.span import Span, place_span

HOST = "pinned_host"
AXES = ("data", "model")  # sequences, KV heads
CACHE_SPEC = PartitionSpec(None, "data", "model", None, None)
BATCH_SPEC = PartitionSpec("data")
ROWS_SPEC = PartitionSpec("data", "model")


@functools.cache
def default_mesh() -> Mesh:
    """The mesh of one device: sequences on axis "data", KV heads on axis "model"."""
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES)


def checked_mesh(mesh: Mesh | None, kv_heads: int) -> Mesh:
    """A mesh that arrays of a model with so many KV heads can be placed on.

    Of Explicit axes, as `jax.make_mesh` makes them, it is the same mesh with Auto ones.

    Raises:
        InputError: for other axes, or KV heads that the devices cannot share equally.
    """
    if mesh is None:
        return default_mesh()
    if mesh.axis_names != AXES:
        raise InputError(f"mesh: its axes are {mesh.axis_names}; make one with {AXES}")
    parts = mesh.shape["model"]
    if kv_heads % parts:
        raise InputError(
            f"mesh: {kv_heads} KV heads are not shared equally by {parts} devices of the axis "
            '"model"; use a divisor'
        )
    return Mesh(mesh.devices, mesh.axis_names)


class Placement(NamedTuple):
    """Where the arrays of a generation live on a mesh.

    Stated at every jit boundary: shardings that XLA chooses would differ between the first step
    and the next, and compile the step twice.
    """

    mesh: Mesh

    @property
    def whole(self) -> NamedSharding:
        """Replicated: weights, scalars."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch(self) -> NamedSharding:
        """[b, ...]: hidden states, lengths, tokens."""
        return NamedSharding(self.mesh, BATCH_SPEC)

    @property
    def rows(self) -> NamedSharding:
        """[b, k, ...]: cached rows on the device, policy state."""
        return NamedSharding(self.mesh, ROWS_SPEC)

    @property
    def host(self) -> NamedSharding:
        """The host cache."""
        return NamedSharding(self.mesh, CACHE_SPEC, memory_kind=HOST)


def capacity_of(cache: Shaped[Array, "l a k t w"], batch: int) -> int:
    """Slots of each of the `batch` sequences, the shared ones included."""
    return shared_slots(cache, batch) + cache.shape[3]


def shared_slots(cache: Shaped[Array, "l a k t w"], batch: int) -> int:
    """How many slots, the first ones, are the same for all of the `batch` sequences."""
    return (cache.shape[1] - batch) * cache.shape[3]


def kernel_slots(
    cache: Shaped[Array, "l a k t w"], layer: Int[Array, ""], slots: Int[Array, "b k n"]
) -> Int[Array, "b k n"]:
    """What slots are called by a kernel that takes the cache for [l, b, k, t, w].

    It counts rows from the place where a sequence and KV head of a layer would begin. (On one
    device of the sequences, or inside `shard_map`.)
    """
    shared = shared_slots(cache, slots.shape[0])
    if not shared:
        return slots
    k, t = cache.shape[2:4]
    sequence = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
    rows = slots.shape[0] + slots // t - sequence  # behind the sequence's own
    place = jnp.where(slots < shared, rows * (k * t) + slots % t, slots - shared)
    return layer * (shared * k) + place


def to_host(x: Array) -> Array:
    """Move to pinned host memory (inside jit)."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """Move to device memory (inside jit)."""
    return jax.device_put(x, jax.memory.Space.Device)


def allocate_host(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Array:
    """An uninitialised host cache [l, b, k, t, w], each device of the mesh its own shard.

    Nothing of its size is ever made in device memory. What it contains is arbitrary: readers mask.
    """
    return _allocation(shape, jnp.dtype(dtype), mesh)()


@functools.lru_cache(maxsize=64)
def _allocation(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Any:
    """Compiled once for each shape, not once for each generation."""
    sharding = Placement(mesh).host
    local = sharding.shard_shape(shape)
    make = jax.shard_map(
        lambda: to_host(lax.empty(local, dtype)), mesh=mesh, in_specs=(), out_specs=CACHE_SPEC
    )
    return jax.jit(make, out_shardings=sharding)


def gather_rows(
    cache: Shaped[Array, "l a k t w"],
    layer: Int[Array, ""],
    slots: Int[Array, "b k n"],
    mesh: Mesh,
) -> Shaped[Array, "b k n w"]:
    """Rows of one layer, by slot, moved to device memory. Slots must be within [0, t).

    On a GPU: one kernel reads the rows over PCIe into a pinned staging buffer, an asynchronous
    copy brings them to the device. Put an `optimization_barrier` between the result and its use,
    behind the work that the copy is to overlap with.
    """

    def local(cache: Array, layer: Array, slots: Array) -> Array:
        sequence = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
        sequence, slots = _stored_at(cache, slots.shape[0], sequence, slots)
        head = lax.broadcasted_iota(jnp.int32, slots.shape, 1)
        indices = jnp.stack([jnp.broadcast_to(layer, slots.shape), sequence, head, slots], axis=-1)
        dimensions = lax.GatherDimensionNumbers(
            offset_dims=(3,), collapsed_slice_dims=(0, 1, 2, 3), start_index_map=(0, 1, 2, 3)
        )
        one_row = (1, 1, 1, 1, cache.shape[-1])
        return to_device(
            lax.gather(cache, to_host(indices), dimensions, one_row, mode="promise_in_bounds")
        )

    return _sharded(local, mesh, (CACHE_SPEC, PartitionSpec(), ROWS_SPEC), ROWS_SPEC)(
        cache, layer, slots
    )


def _stored_at(cache: Array, batch: int, sequence: Array, slots: Array) -> tuple[Array, Array]:
    """The row of the array that a sequence's slot is in, and its slot there."""
    shared, size = shared_slots(cache, batch), cache.shape[3]
    if not shared:
        return sequence, slots
    own = slots >= shared
    return (
        jnp.where(own, sequence, batch + slots // size),
        jnp.where(own, slots - shared, slots % size),
    )


def gather_jobs(
    cache: Shaped[Array, "l a k t w"],
    layer: Int[Array, ""],
    head: Int[Array, " p"],
    slots: Int[Array, "p c"],
    batch: int,
) -> Shaped[Array, "1 p c w"]:
    """As `gather_rows` on one device, for a list of KV heads, counted through all sequences."""
    sequence, head = head // cache.shape[2], head % cache.shape[2]
    row, slots = _stored_at(cache, batch, sequence[:, None], slots)
    places = [layer, row, head[:, None], slots]
    indices = jnp.stack([jnp.broadcast_to(x, slots.shape) for x in places], axis=-1)
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(2,), collapsed_slice_dims=(0, 1, 2, 3), start_index_map=(0, 1, 2, 3)
    )
    one_row = (1, 1, 1, 1, cache.shape[-1])
    rows = lax.gather(cache, to_host(indices), dimensions, one_row, mode="promise_in_bounds")
    return to_device(rows)[None]


def read_block(
    cache: Shaped[Array, "l a k t w"],
    layer: Int[Array, ""],
    start: Int[Array, ""],
    size: int,
    mesh: Mesh,
    batch: int | None = None,
) -> Shaped[Array, "b k n w"]:
    """`size` consecutive slots of one layer, from `start`, moved to device memory.

    Args:
        batch: number of the sequences; without it all rows of the array are read as they are.
    """
    if batch is not None and cache.shape[1] > batch:
        slots = start + jnp.arange(size, dtype=jnp.int32)
        slots = jnp.broadcast_to(slots, (batch, cache.shape[2], size))
        return gather_rows(cache, layer, slots, mesh)

    def local(cache: Array, layer: Array, start: Array) -> Array:
        _, b, k, _, w = cache.shape
        zero = jnp.int32(0)
        block = lax.dynamic_slice(cache, (layer, zero, zero, start, zero), (1, b, k, size, w))
        return to_device(block.reshape(b, k, size, w))

    return _sharded(local, mesh, (CACHE_SPEC, PartitionSpec(), PartitionSpec()), ROWS_SPEC)(
        cache, layer, start
    )


def write_span(
    cache: Shaped[Array, "l a k t w"],
    layer: Int[Array, ""],
    rows: Shaped[Array, "b k c w"],
    span: Span,
    mesh: Mesh,
) -> Shaped[Array, "l a k t w"]:
    """Write a chunk's rows into one layer, each sequence's at its own place.

    Nothing else is changed: of padding, and beyond the end, what is there is written again. In
    place where the cache is donated.
    """

    def local(cache: Array, layer: Array, rows: Array, start: Array, count: Array) -> Array:
        (_, _, k, t, w), size, zero = cache.shape, rows.shape[2], jnp.int32(0)
        start = start - shared_slots(cache, rows.shape[0])
        at, token, inside = place_span(size, t, Span(start, count))

        def write(sequence: Array, cache: Array) -> Array:
            where = (layer, sequence, zero, at[sequence], zero)
            old = lax.dynamic_slice(cache, where, (1, 1, k, size, w))
            old = to_device(old.reshape(k, size, w))
            new = jnp.take(rows[sequence], token[sequence], axis=1, mode="clip")
            new = jnp.where(inside[sequence][None, :, None], new, old)
            return lax.dynamic_update_slice(cache, to_host(new[None, None]), where)

        # A loop: unrolled, XLA takes each sequence's old rows from the cache as it was before the
        # sequence in front of it, and copies all of it to do so.
        return lax.fori_loop(zero, jnp.int32(rows.shape[0]), write, cache)

    specs = (CACHE_SPEC, PartitionSpec(), ROWS_SPEC, BATCH_SPEC, BATCH_SPEC)
    return _sharded(local, mesh, specs, CACHE_SPEC)(cache, layer, rows, span.start, span.count)


def write_block(
    cache: Shaped[Array, "l a k t w"],
    layer: Int[Array, ""],
    sequence: Int[Array, ""],
    start: Int[Array, ""],
    rows: Shaped[Array, "1 k n w"],
    mesh: Mesh,
) -> Shaped[Array, "l a k t w"]:
    """Write n rows of one layer and row of the array, from its slot `start`.

    In place where donated. The mesh has one device for the sequences. Clamped as in `append_rows`.
    """

    def local(cache: Array, layer: Array, sequence: Array, start: Array, rows: Array) -> Array:
        zero = jnp.int32(0)
        at = (layer, sequence, zero, start, zero)
        return lax.dynamic_update_slice(cache, to_host(rows[None]), at)

    one = PartitionSpec()
    specs = (CACHE_SPEC, one, one, one, PartitionSpec(None, "model"))
    return _sharded(local, mesh, specs, CACHE_SPEC)(cache, layer, sequence, start, rows)


def append_rows(
    cache: Shaped[Array, "l a k t w"],
    rows: Shaped[Array, "l b k n w"],
    positions: Int[Array, " b"],
    mesh: Mesh,
) -> Shaped[Array, "l a k t w"]:
    """Write n rows of every layer at each sequence's own position. In place where donated.

    A position beyond t - n would be clamped and overwrite older rows: capacity is the caller's to
    check, outside jit.
    """

    def local(cache: Array, rows: Array, positions: Array) -> Array:
        zero, positions = jnp.int32(0), positions - shared_slots(cache, rows.shape[1])
        for sequence in range(rows.shape[1]):
            one = to_host(lax.slice_in_dim(rows, sequence, sequence + 1, axis=1))
            at = (zero, jnp.int32(sequence), zero, positions[sequence], zero)
            cache = lax.dynamic_update_slice(cache, one, at)
        return cache

    specs = (CACHE_SPEC, CACHE_SPEC, BATCH_SPEC)
    return _sharded(local, mesh, specs, CACHE_SPEC)(cache, rows, positions)


def store_rows(
    cache: Shaped[Array, "l a k t w"],
    rows: Shaped[Array, "l b k n w"],
    slots: Int[Array, "l b k n"],
    mesh: Mesh,
) -> Shaped[Array, "l a k t w"]:
    """Write n rows of every layer, sequence and KV head, each to its slot. In place where donated.

    Slots are distinct; a row whose slot is t is not written.
    """

    def local(cache: Array, rows: Array, slots: Array) -> Array:
        place = [lax.broadcasted_iota(jnp.int32, slots.shape, axis) for axis in range(3)]
        dimensions = lax.ScatterDimensionNumbers(
            update_window_dims=(4,),
            inserted_window_dims=(0, 1, 2, 3),
            scatter_dims_to_operand_dims=(0, 1, 2, 3),
        )
        return lax.scatter(
            cache,
            to_host(jnp.stack([*place, slots], axis=-1)),
            to_host(rows),
            dimensions,
            unique_indices=True,
            mode="drop",
        )

    slots_spec = PartitionSpec(None, "data", "model", None)
    return _sharded(local, mesh, (CACHE_SPEC, CACHE_SPEC, slots_spec), CACHE_SPEC)(
        cache, rows, slots
    )


def _sharded(
    function: Callable[..., Array], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Array]:
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
