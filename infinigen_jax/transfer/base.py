"""Transfer protocol: move requested rows from host to device during a layer's work.

    ticket = transfer.start(host, layer, request, hot_rows, replacement, mesh)  # after speculation
    ticket, q = transfer.order(ticket, q)
    ...                                                                    # attention and MLP
    x, rows, hot_rows = transfer.wait(ticket, x)                           # for the next layer

`start` and `wait` are traced into the step; Python does not run between two layers.
"""

from typing import Any, ClassVar, Protocol, runtime_checkable

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.hot_set import Replacement
from infinigen_jax.selection.select import Request


@runtime_checkable
class Transfer(Protocol):
    """Interface of a transfer; see the module's docstring.

    Attributes:
        masks: whether only valid rows that the hot set lacks are moved. If not, the whole static
            request moves, unless a hot set exists.
        in_place: whether `wait` returns no rows without a hot set; attention then reads them in the
            host cache.
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
        replacement: Replacement | None,
        mesh: Mesh,
    ) -> Any:
        """Start to move the rows of one layer's request.

        Args:
            host: host cache, in its storage dtype; bytes are moved unchanged.
            layer: index among the host layers.
            hot_rows: rows of the layer's hot set, replaced by the result of `wait`; None without
                one.
            replacement: entries and missing rows of the hot set; None without one.

        Returns:
            A ticket for `order` and `wait`.
        """
        ...

    def order(self, ticket: Any, q: Array) -> tuple[Any, Array]:
        """Order the start before the overlapping work, which begins with q."""
        ...

    def wait(
        self, ticket: Any, x: Float[Array, "b e"]
    ) -> tuple[
        Float[Array, "b e"], Shaped[Array, "b k n w"] | None, Shaped[Array, "b k h w"] | None
    ]:
        """Return the rows in the order of the request.

        Rows beyond its count are undefined with `masks`, and else finite.

        Work that uses the returned x runs after the end of the transfer.

        Returns:
            x, the rows (None if `in_place` without a hot set), and the new rows of the hot set.
        """
        ...
