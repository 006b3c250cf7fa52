"""What a transfer is: it moves requested rows from host to device beside a layer's work.

    ticket = transfer.start(host, layer, request, hot_rows, plan, mesh)    behind the speculation
    ticket, q = transfer.behind(ticket, q)
    ...                                                                    attention and MLP
    x, rows, hot_rows = transfer.wait(ticket, x)                           for the next layer

`start` and `wait` are traced into the step; nothing here talks to Python between two layers.
"""

from typing import Any, ClassVar, Protocol, runtime_checkable

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.hot_set import Plan
from infinigen_jax.selection.select import Request


@runtime_checkable
class Transfer(Protocol):
    """See the module's docstring.

    Attributes:
        masks: rows beyond a request's count, and rows that the hot set has, are not moved. (If
            not, the whole static request moves, unless there is a hot set.)
        in_place: without a hot set `wait` returns no rows: attention reads them in the host cache.
    """

    name: ClassVar[str]

    @property
    def masks(self) -> bool: ...
    @property
    def in_place(self) -> bool: ...

    def start(
        self,
        host: Shaped[Array, "l a k t w"],
        layer: Int[Array, ""],
        request: Request,
        hot_rows: Shaped[Array, "b k h w"] | None,
        plan: Plan | None,
        mesh: Mesh,
    ) -> Any:
        """Begin to move the rows of a request, one layer's.

        Args:
            host: the host cache, in its storage dtype; bytes are moved as they are.
            hot_rows: the rows of the layer's hot set, replaced by what `wait` returns; None
                without one, and then there is no plan.
        """
        ...

    def behind(self, ticket: Any, q: Array) -> tuple[Any, Array]:
        """Tie the work to run beside the transfer, which begins with q, behind the start."""
        ...

    def wait(
        self, ticket: Any, x: Float[Array, "b e"]
    ) -> tuple[
        Float[Array, "b e"], Shaped[Array, "b k n w"] | None, Shaped[Array, "b k h w"] | None
    ]:
        """The rows, in the order of the request; what lies beyond its count is finite.

        Whatever uses the returned x comes behind the end of the transfer.
        """
        ...
