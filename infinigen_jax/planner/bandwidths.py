"""Measurement of memory and transfer bandwidths in about a second."""

import timeit
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.cache.host_array import allocate_host, default_mesh, gather_rows, write_span
from infinigen_jax.ops.span import Span

ROW = 128  # elements of a gathered row, float32


def memory_read_bandwidth(size: int | None = None) -> float:
    """Return the bytes per second at which the device reads its memory, with all cores.

    This is the best of several ways to sum `size` bytes, because a lower bound on time needs the
    highest rate. The default size is 0.5 GB on the CPU and 2 GB on a GPU, which would read less too
    quickly to measure.
    """
    size = size or (1 << 29 if jax.default_backend() == "cpu" else 1 << 31)
    side = 4096
    x = jax.random.uniform(jax.random.key(0), (size // 4 // side, side), jnp.float32)
    v = jnp.ones(side, jnp.float32)
    sums, product = jax.jit(jnp.sum), jax.jit(jnp.matmul)
    ways: list[Callable[[], Any]] = [lambda: sums(x), lambda: product(x, v)]
    return size / min(best_seconds(way) for way in ways)


def host_to_device_bandwidth(size: int = 1 << 28) -> float | None:
    """Return the bytes per second of a copy from pinned host memory; None on the CPU."""
    if jax.default_backend() == "cpu":
        return None
    device = jax.devices()[0]
    here = jax.sharding.SingleDeviceSharding(device)
    x = jax.random.bits(jax.random.key(0), (size,), jnp.uint8)
    x = jax.device_put(x, here.with_memory_kind("pinned_host"))
    return size / best_seconds(lambda: jax.device_put(x, here))


def gather_bandwidth(size: int = 1 << 27) -> float:
    """Return the bytes per second of gathering one row in twenty from `size` bytes on the host."""
    heads, tokens = 8, size // 4 // ROW // 8
    mesh = default_mesh()
    cache = allocate_host((1, 1, heads, tokens, ROW), jnp.float32, mesh)
    # Pages that were never written are not backed by memory.
    whole = Span.whole(1, tokens)
    write = jax.jit(lambda c, x: write_span(c, jnp.int32(0), x, whole, mesh), donate_argnums=0)
    cache = write(cache, jnp.ones((1, heads, tokens, ROW), jnp.float32))
    chosen = np.random.default_rng(0).permuted(np.tile(np.arange(tokens), (heads, 1)), axis=1)
    slots = jnp.asarray(np.sort(chosen[None, :, : tokens // 20], axis=2), jnp.int32)
    gather = jax.jit(lambda cache, slots: gather_rows(cache, jnp.int32(0), slots, mesh))
    return slots.size * ROW * 4 / best_seconds(lambda: gather(cache, slots))


def best_seconds(way: Callable[[], Any]) -> float:
    """Return the least seconds of a call; on a GPU of several calls, which hides the dispatch."""
    calls = 1 if jax.default_backend() == "cpu" else 8
    jax.block_until_ready(way())
    times = timeit.repeat(lambda: jax.block_until_ready([way() for _ in range(calls)]), number=1)
    return min(times) / calls
