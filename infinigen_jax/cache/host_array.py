"""Pinned host memory in JAX: allocate it, read rows from it, write rows into it.

A memory kind is part of an array's type. XLA may turn an operation on a host array into a copy of
the whole array, or into arithmetic over PCIe. The functions here avoid both (tests/gpu inspects the
compiled programs), so use them for every access to host memory. They run inside `jax.shard_map`
because automatic partitioning of host gathers does not compile; one device has no extra cost.

The host cache is one array [l, a, k, t, w]: host layers, sequences, KV heads, slots, and a row of
width w that holds a token's key and value concatenated (w = 2d, or packed bytes).

Axis a holds the b sequences, followed by the prefix that all of them share, stored once:

    slots of every sequence    0 .. t-1     t .. 2t-1    2t .. 3t-1
    place on axis a (b + 2)    b            b + 1        the sequence's number

Without a shared prefix a = b, and each sequence has t private slots. Functions here number a
sequence's slots from 0, shared ones first, unless stated otherwise; those that write accept private
slots only.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from infinigen_jax.errors import InputError
from infinigen_jax.machine.memory_limits import note_pinned
from infinigen_jax.ops.span import Span, place_span

HostCache = Shaped[Array, "l a k t w"]
Number = Int[Array, ""]  # of a layer, a row of axis a or a slot

HOST = "pinned_host"
AXES = ("data", "model")  # sequences, KV heads
CACHE_SPEC = PartitionSpec(None, "data", "model", None, None)
BATCH_SPEC = PartitionSpec("data")
ROWS_SPEC = PartitionSpec("data", "model")


@functools.cache
def default_mesh() -> Mesh:
    """Return the mesh of one device."""
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), AXES)


def checked_mesh(mesh: Mesh | None, kv_heads: int) -> Mesh:
    """Return a mesh on which arrays of a model with `kv_heads` KV heads can be placed.

    A mesh with Explicit axes, as `jax.make_mesh` makes it, is replaced by one with Auto axes.
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


class Placement:
    """Shardings of a generation's arrays on a mesh, stated at every jit boundary.

    Shardings chosen by XLA would differ after the first step and compile the step twice.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.whole = NamedSharding(mesh, PartitionSpec())  # of replicated arrays: weights, scalars
        self.batch = NamedSharding(mesh, BATCH_SPEC)  # of [b, ...]: hidden states, lengths, tokens
        self.rows = NamedSharding(mesh, ROWS_SPEC)  # of [b, k, ...]: device rows, policy state
        self.host = NamedSharding(mesh, CACHE_SPEC, memory_kind=HOST)  # of the host cache


def capacity_of(cache: HostCache, batch: int) -> int:
    """Return the slots of each of the `batch` sequences, including shared ones."""
    return shared_slots(cache, batch) + cache.shape[3]


def shared_slots(cache: HostCache, batch: int) -> int:
    """Return the number of leading slots that all of the `batch` sequences share."""
    return (cache.shape[1] - batch) * cache.shape[3]


def kernel_slots(
    cache: HostCache, layer: Number, slots: Int[Array, "b k n"]
) -> Int[Array, "b k n"]:
    """Return slots as a kernel numbers them, in a cache that it takes as [l, b, k, t, w].

    Call it with the arrays of one device, or inside `shard_map`.
    """
    shared = shared_slots(cache, slots.shape[0])
    if not shared:
        return slots
    k, t = cache.shape[2:4]
    sequence = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
    row, slots = _stored_at(cache, slots.shape[0], sequence, slots)
    return layer * (shared * k) + (row - sequence) * (k * t) + slots


def to_host(x: Array) -> Array:
    """Move an array to pinned host memory (inside jit)."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Array) -> Array:
    """Move an array to device memory (inside jit)."""
    return jax.device_put(x, jax.memory.Space.Device)


def allocate_host(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Array:
    """Allocate a host cache [l, b, k, t, w] with arbitrary contents and no copy on the device."""
    host = _allocation(shape, jnp.dtype(dtype), mesh)()
    note_pinned(mesh.devices.flat[0])
    return host


@functools.lru_cache(maxsize=64)
def _allocation(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> Any:
    sharding = Placement(mesh).host
    local = sharding.shard_shape(shape)
    make = jax.shard_map(
        lambda: to_host(lax.empty(local, dtype)), mesh=mesh, in_specs=(), out_specs=CACHE_SPEC
    )
    return jax.jit(make, out_shardings=sharding)


def gather_rows(
    cache: HostCache, layer: Number, slots: Int[Array, "b k n"], mesh: Mesh
) -> Shaped[Array, "b k n w"]:
    """Gather rows of one host layer by slot, within the capacity, and move them to device memory.

    On a GPU one kernel reads the rows over PCIe into a pinned staging buffer, and an asynchronous
    copy brings them to the device. Put an `optimization_barrier` between the result and its use,
    after the work that the copy should overlap with.
    """

    def local(cache: Array, layer: Array, slots: Array) -> Array:
        sequence = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
        sequence, slots = _stored_at(cache, slots.shape[0], sequence, slots)
        head = lax.broadcasted_iota(jnp.int32, slots.shape, 1)
        return _gather(cache, layer, sequence, head, slots)

    specs = CACHE_SPEC, PartitionSpec(), ROWS_SPEC
    return sharded(local, mesh, specs, ROWS_SPEC)(cache, layer, slots)


def _gather(cache: Array, *places: Array) -> Array:
    """Move the rows at these indices of the cache's first four axes to device memory."""
    shape = places[-1].shape  # the others are broadcast to it
    indices = jnp.stack([jnp.broadcast_to(x, shape) for x in places], axis=-1)
    dimensions = lax.GatherDimensionNumbers(
        offset_dims=(len(shape),), collapsed_slice_dims=(0, 1, 2, 3), start_index_map=(0, 1, 2, 3)
    )
    one_row = (1, 1, 1, 1, cache.shape[-1])
    rows = lax.gather(cache, to_host(indices), dimensions, one_row, mode="promise_in_bounds")
    return to_device(rows)


def _stored_at(cache: Array, batch: int, sequence: Array, slots: Array) -> tuple[Array, Array]:
    """Return the array row that holds a sequence's slot, and the slot's index in that row."""
    shared, size = shared_slots(cache, batch), cache.shape[3]
    if not shared:
        return sequence, slots
    private = slots >= shared
    return (
        jnp.where(private, sequence, batch + slots // size),
        jnp.where(private, slots - shared, slots % size),
    )


def gather_items(
    cache: HostCache, layer: Number, head: Int[Array, " p"], slots: Int[Array, "p c"], batch: int
) -> Shaped[Array, "1 p c w"]:
    """Gather rows on one device for work items; heads are counted over all sequences."""
    sequence, head = head // cache.shape[2], head % cache.shape[2]
    row, slots = _stored_at(cache, batch, sequence[:, None], slots)
    return _gather(cache, layer, row, head[:, None], slots)[None]


def read_block(
    cache: HostCache, layer: Number, start: Number, size: int, mesh: Mesh, batch: int
) -> Shaped[Array, "b k n w"]:
    """Read `size` consecutive slots of the `batch` sequences of a layer into device memory."""
    if cache.shape[1] > batch:
        slots = start + jnp.arange(size, dtype=jnp.int32)
        slots = jnp.broadcast_to(slots, (batch, cache.shape[2], size))
        return gather_rows(cache, layer, slots, mesh)

    def local(cache: Array, layer: Array, start: Array) -> Array:
        return _block(cache, layer, jnp.int32(0), start, cache.shape[1], size)

    one = PartitionSpec()
    return sharded(local, mesh, (CACHE_SPEC, one, one), ROWS_SPEC)(cache, layer, start)


def read_sequence(
    cache: HostCache, layer: Number, sequence: Number, start: Number, size: int, mesh: Mesh
) -> Shaped[Array, "1 k n w"]:
    """Read `size` consecutive slots of one row of axis a; needs one device on the axis "data"."""

    def local(cache: Array, layer: Array, sequence: Array, start: Array) -> Array:
        return _block(cache, layer, sequence, start, 1, size)

    specs = CACHE_SPEC, *[PartitionSpec()] * 3
    return sharded(local, mesh, specs, ROWS_SPEC)(cache, layer, sequence, start)


def _block(cache: Array, layer: Array, first: Array, start: Array, b: int, size: int) -> Array:
    (_, _, k, _, w), zero = cache.shape, jnp.int32(0)
    block = lax.dynamic_slice(cache, (layer, first, zero, start, zero), (1, b, k, size, w))
    return to_device(block.reshape(b, k, size, w))


def write_span(
    cache: HostCache, layer: Number, rows: Shaped[Array, "b k c w"], span: Span, mesh: Mesh
) -> HostCache:
    """Write a chunk's rows into one layer, each sequence at its own position; in place if donated.

    All other slots keep their contents: padding and rows beyond the end write back the old rows.
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

        # Unrolled, XLA would read each sequence's old rows from the cache before the previous
        # update, and copy the whole cache to do so.
        return lax.fori_loop(zero, jnp.int32(rows.shape[0]), write, cache)

    specs = (CACHE_SPEC, PartitionSpec(), ROWS_SPEC, BATCH_SPEC, BATCH_SPEC)
    return sharded(local, mesh, specs, CACHE_SPEC)(cache, layer, rows, span.start, span.count)


def write_block(
    cache: HostCache,
    layer: Number,
    sequence: Number,
    start: Number,
    rows: Shaped[Array, "m k n w"],
    mesh: Mesh,
) -> HostCache:
    """Write n rows of m layers, from `layer`, to one row of axis a; in place if donated.

    `start` is clamped so that the rows fit. Needs one device on the axis "data".
    """

    def local(cache: Array, layer: Array, sequence: Array, start: Array, rows: Array) -> Array:
        zero = jnp.int32(0)
        at = (layer, sequence, zero, start, zero)
        return lax.dynamic_update_slice(cache, to_host(rows[:, None]), at)

    one = PartitionSpec()
    specs = (CACHE_SPEC, one, one, one, PartitionSpec(None, "model"))
    return sharded(local, mesh, specs, CACHE_SPEC)(cache, layer, sequence, start, rows)


def store_rows(
    cache: HostCache, rows: Shaped[Array, "l b k n w"], slots: Int[Array, "l b k n"], mesh: Mesh
) -> HostCache:
    """Write n rows of every layer, sequence and KV head to distinct slots; drop those for slot t.

    The write is in place if the cache is donated.
    """

    def local(cache: Array, rows: Array, slots: Array) -> Array:
        place = [lax.broadcasted_iota(jnp.int32, slots.shape, axis) for axis in range(3)]
        where = to_host(jnp.stack([*place, slots], axis=-1))
        dimensions = lax.ScatterDimensionNumbers(
            update_window_dims=(4,),
            inserted_window_dims=(0, 1, 2, 3),
            scatter_dims_to_operand_dims=(0, 1, 2, 3),
        )
        return lax.scatter(
            cache, where, to_host(rows), dimensions, unique_indices=True, mode="drop"
        )

    specs = CACHE_SPEC, CACHE_SPEC, PartitionSpec(None, "data", "model", None)
    return sharded(local, mesh, specs, CACHE_SPEC)(cache, rows, slots)


def sharded(
    function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return a function of arrays on a mesh, from one of the parts that a device holds."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
