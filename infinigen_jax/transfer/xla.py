"""Transfer by XLA alone: a gather in host memory, then an asynchronous copy. Runs everywhere."""

import dataclasses
from typing import ClassVar

from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from infinigen_jax.memory import gather_rows


@dataclasses.dataclass(frozen=True)
class XlaTransfer:
    """The reference transfer. Every row of the request moves, its padding included."""

    name: ClassVar[str] = "xla"

    def start(
        self,
        host: Float[Array, "l b k t w"],
        layer: Int[Array, ""],
        slots: Int[Array, "b k n"],
        mesh: Mesh,
    ) -> Float[Array, "b k n w"]:
        return gather_rows(host, layer, slots, mesh)

    def wait(
        self, ticket: Float[Array, "b k n w"], x: Float[Array, "b e"]
    ) -> tuple[Float[Array, "b e"], Float[Array, "b k n w"]]:
        # Ties the end of the copy to the end of the layer: without it, XLA awaits the copy early.
        x, rows = lax.optimization_barrier((x, ticket))
        return x, rows
