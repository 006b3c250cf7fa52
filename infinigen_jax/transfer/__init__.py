"""Moving requested rows from host to device: started before a layer's work, awaited after it.

    ticket = transfer.start(host, layer, slots, mesh)     behind the speculation
    ...                                                   attention and MLP
    x, rows = transfer.wait(ticket, x)                    rows for the next layer

`start` and `wait` are traced into the step; nothing here talks to Python at run time.
"""

from typing import Any, ClassVar, Protocol, runtime_checkable

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from infinigen_jax.errors import InputError
from infinigen_jax.transfer.xla import XlaTransfer


@runtime_checkable
class Transfer(Protocol):
    """See the module's docstring."""

    name: ClassVar[str]

    def start(
        self,
        host: Float[Array, "l b k t w"],
        layer: Int[Array, ""],
        slots: Int[Array, "b k n"],
        mesh: Mesh,
    ) -> Any: ...

    def wait(
        self, ticket: Any, x: Float[Array, "b e"]
    ) -> tuple[Float[Array, "b e"], Float[Array, "b k n w"]]: ...


def make_transfer(name: str) -> Transfer:
    """The transfer called `name` on the command line: "auto" or "xla"."""
    if name in ("auto", "xla"):
        return XlaTransfer()
    raise InputError(f"--transfer {name}: not available; use auto or xla")


__all__ = ["Transfer", "XlaTransfer", "make_transfer"]
