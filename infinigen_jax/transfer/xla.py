"""Transfer by XLA alone: a gather in host memory, then an asynchronous copy. Runs everywhere."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Shaped

from infinigen_jax.cache.host_array import gather_rows
from infinigen_jax.cache.hot_set import Plan
from infinigen_jax.ops.compaction import compact
from infinigen_jax.ops.indexing import look_up, put
from infinigen_jax.selection.select import Request

CHUNK = 64  # missing rows, per KV head, that are moved at once into a hot set


@dataclasses.dataclass(frozen=True)
class XlaTransfer:
    """The reference transfer.

    Without a hot set every row of the request moves, its padding included. With one, missing rows
    move in chunks, as many as there are. On a GPU that loop asks the device how many: there a hot
    set belongs to the `cuda` transfer.

    Attributes:
        in_place: without a hot set nothing moves, attention reads the rows that are meant where
            they are. For a CPU, whose own memory the host's is.
    """

    name: ClassVar[str] = "xla"

    in_place: bool = False

    @property
    def masks(self) -> bool:
        return self.in_place

    def start(
        self,
        host: Shaped[Array, "l a k t w"],
        layer: Int[Array, ""],
        request: Request,
        hot_rows: Shaped[Array, "b k h w"] | None,
        plan: Plan | None,
        mesh: Mesh,
    ) -> tuple[Shaped[Array, "b k n w"] | None, Shaped[Array, "b k h w"] | None]:
        if hot_rows is None:
            if self.in_place:
                return None, None
            return gather_rows(host, layer, request.slots, mesh), None
        assert plan is not None
        hot_rows = move_missing(host, layer, request.slots, hot_rows, plan, mesh)
        rows = jnp.take_along_axis(
            hot_rows, plan.entry[..., None], axis=2, mode="promise_in_bounds"
        )
        return rows, hot_rows

    def behind(self, ticket: Any, q: Array) -> tuple[Any, Array]:
        return ticket, q  # XLA starts its own copies as early as it can

    def wait(
        self,
        ticket: tuple[Shaped[Array, "b k n w"] | None, Shaped[Array, "b k h w"] | None],
        x: Float[Array, "b e"],
    ) -> tuple[
        Float[Array, "b e"], Shaped[Array, "b k n w"] | None, Shaped[Array, "b k h w"] | None
    ]:
        # Ties the end of the copy to the end of the layer: without it, XLA awaits the copy early.
        x, (rows, hot_rows) = lax.optimization_barrier((x, ticket))
        return x, rows, hot_rows


def xla_transfer() -> XlaTransfer:
    """As it is best for this process's devices."""
    return XlaTransfer(in_place=jax.default_backend() == "cpu")


def move_missing(
    host: Shaped[Array, "l a k t w"],
    layer: Int[Array, ""],
    slots: Int[Array, "b k n"],
    hot_rows: Shaped[Array, "b k h w"],
    plan: Plan,
    mesh: Mesh,
) -> Shaped[Array, "b k h w"]:
    """Fill the entries of the missing rows from the host, in place where donated."""
    h, n = hot_rows.shape[2], slots.shape[2]
    chunk = min(CHUNK, n)
    size = -(-n // chunk) * chunk
    counts = jnp.sum(plan.miss, axis=-1, dtype=jnp.int32)
    place = compact(_padded(plan.miss, size), size)  # which of the request's rows, in order
    place = jnp.minimum(place, n - 1)
    missing = lax.broadcasted_iota(jnp.int32, place.shape, 2) < counts[..., None]
    slots = jnp.where(missing, look_up(slots, place), 0)
    entries = jnp.where(missing, look_up(plan.entry, place), h)

    def move(i: Array, hot_rows: Array) -> Array:
        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=2)

        # What a scatter does to the shape of its updates must not come before they are moved.
        rows = lax.optimization_barrier(gather_rows(host, layer, cut(slots), mesh))
        return put(hot_rows, cut(entries), rows)

    chunks = (jnp.max(counts) + (chunk - 1)) // chunk
    return lax.fori_loop(jnp.int32(0), chunks, move, hot_rows)


def _padded(mask: Bool[Array, "b k n"], size: int) -> Bool[Array, "b k m"]:
    return jnp.pad(mask, ((0, 0), (0, 0), (0, size - mask.shape[2])))
