"""Loads of `benchmarks.transfer`: the rows that it moves, and the concurrent computation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.cache.host_array import Placement, allocate_host, default_mesh, write_span
from infinigen_jax.ops.span import Span
from infinigen_jax.selection.select import Request

GROUPS = (8, 8)  # sequences, KV heads
MOVED_BYTES = 1 << 25  # bytes per transfer, limited by the rows of the host array
WEIGHTS = (16, 4096, 4096)  # bfloat16, 0.5 GB: more than a cache on the chip holds


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one measurement: bytes per row, slots per group, and rows requested per group."""

    row: int
    capacity: int
    wanted: int

    @classmethod
    def of(cls, row: int, cache_bytes: int) -> "Shape":
        groups = GROUPS[0] * GROUPS[1]
        capacity = cache_bytes // (groups * row)
        return cls(row, capacity, max(1, min(capacity // 4, MOVED_BYTES // (groups * row))))

    @property
    def moved(self) -> int:
        """Bytes of all requested rows."""
        return GROUPS[0] * GROUPS[1] * self.wanted * self.row

    @property
    def cache_bytes(self) -> int:
        """Bytes of the host array."""
        return GROUPS[0] * GROUPS[1] * self.capacity * self.row

    def host(self) -> jax.Array:
        """Return a host cache of one layer that holds `content`."""
        mesh = default_mesh()
        host = allocate_host((1, *GROUPS, self.capacity, self.row), jnp.uint8, mesh)
        whole = Span.whole(GROUPS[0], self.capacity)

        def fill(host: jax.Array) -> jax.Array:
            slots = jnp.broadcast_to(jnp.arange(self.capacity), (*GROUPS, self.capacity))
            rows = self.content(slots).astype(jnp.uint8)
            return write_span(host, jnp.int32(0), rows, whole, mesh)

        return jax.jit(fill, donate_argnums=0, out_shardings=Placement(mesh).host)(host)

    def content(self, slots: Any) -> Any:
        """Return the bytes of rows, which depend on group, slot and column: [b, k, n, row]."""
        group = np.arange(GROUPS[0] * GROUPS[1]).reshape(*GROUPS, 1, 1)
        columns = np.arange(self.row)[None, None, None]
        return (slots[..., None] * (2 * columns + 1) + 37 * group + (slots[..., None] >> 8)) % 251

    def request(self) -> Request:
        """Return a request for different rows of each group, in random order."""
        slots = np.broadcast_to(np.arange(self.capacity, dtype=np.int32), (*GROUPS, self.capacity))
        slots = np.random.default_rng(0).permuted(slots, axis=-1)[..., : self.wanted]
        count = np.full(GROUPS, self.wanted, np.int32)
        at = Placement(default_mesh()).rows
        return Request(jax.device_put(slots, at), jax.device_put(count, at))


@dataclasses.dataclass(frozen=True)
class Compute:
    """Work that reads weights: a chain of products of a few rows with matrices."""

    x: jax.Array
    weights: jax.Array

    @classmethod
    def make(cls, shape: tuple[int, int, int] = WEIGHTS) -> "Compute":
        keys = jax.random.split(jax.random.key(1))
        x = jax.random.normal(keys[0], (GROUPS[0], shape[1]), jnp.bfloat16)
        weights = jax.random.normal(keys[1], shape, jnp.bfloat16) * shape[1] ** -0.5
        return cls(x, weights.astype(jnp.bfloat16))
