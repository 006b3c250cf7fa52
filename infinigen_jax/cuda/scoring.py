"""The kernels that score the index, as traced functions. See score.cu."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from infinigen_jax.cuda.launch import LAUNCH, call

THREADS = 256
TILE = 2 * THREADS  # slots of a block
MAX_COLUMNS = 256  # as in score.cu
MAX_RUN = 128  # of slots that make up one number of `index_rest`; it divides a tile


def index_scores(
    query: Float[Array, "b k g r"], index: UInt32[Array, "b k e t"], bits: int
) -> Float[Array, "b k g t"]:
    """Scores of every slot.

    Args:
        query: float32, in the index's coordinates; at most MAX_COLUMNS columns.
        index: of codes of so many bits, 4 or 8.
    """

    def local(query: Array, index: Array) -> Array:
        b, k, g, _ = query.shape
        out = jax.ShapeDtypeStruct((b, k, g, index.shape[3]), jnp.float32)
        return _run(f"index_scores_{bits}", (query, index), out, (g, *_sizes(query, index)))

    return _on_each_device(local, query, index)


def index_rest(
    query: Float[Array, "b k g r"],
    index: UInt32[Array, "b k e t"],
    bits: int,
    positions: Int[Array, " b"],
    slots: Int[Array, "b k n"],
    count: Int[Array, "b k"],
    blocks: int,
    sinks: int,
    window: int,
) -> Float[Array, "b k g m"]:
    """`counting.log_rest` of the scores, which are not stored.

    Args:
        positions: of the current tokens; sinks .. position - window count.
        slots, count: what is requested and does not.
        blocks: m; the t / m slots of each are at most MAX_RUN, a power of two.
    """

    def local(query: Array, index: Array, positions: Array, slots: Array, count: Array) -> Array:
        b, k, g, _ = query.shape
        run = index.shape[3] // blocks
        out = jax.ShapeDtypeStruct((b, k, g, blocks), jnp.float32)
        integers = (k, g, *_sizes(query, index), slots.shape[2], run, sinks, window)
        operands = (query, index, positions, slots, count)
        return _run(f"index_rest_{bits}", operands, out, integers)

    return _on_each_device(local, query, index, positions, slots, count)


def _sizes(query: Array, index: Array) -> tuple[int, int, int, int]:
    """Columns, words of codes, capacity, tiles."""
    capacity = index.shape[3]
    return query.shape[3], index.shape[2] - 1, capacity, -(-capacity // TILE)


def _run(
    kernel: str, operands: tuple[Array, ...], out: jax.ShapeDtypeStruct, integers: tuple[int, ...]
) -> Array:
    b, k, _, capacity = operands[1].shape
    grid = (b * k * -(-capacity // TILE), THREADS)
    (result,) = call(LAUNCH, operands, (out,), {}, kernel, grid, integers)
    return result


def _on_each_device(local: Callable[..., Array], *arrays: Any) -> Array:
    """Call on every device's part of arrays [b, ...] and [b, k, ...], on the mesh they live on."""
    mesh = jax.typeof(arrays[1]).sharding.mesh
    if mesh.empty or mesh.size == 1:
        return local(*arrays)
    specs = tuple(PartitionSpec(*("data", "model")[: x.ndim]) for x in arrays)
    out = PartitionSpec("data", "model")
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(*arrays)
