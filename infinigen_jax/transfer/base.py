"""Transfer protocol: move requested rows from host to device during a layer's work.

`fetch` is traced into the step, where Python does not run between two layers. The rows that it
returns exist once the transfer has ended; XLA runs other work meanwhile.
"""

from typing import ClassVar, Protocol, runtime_checkable

from jax.sharding import Mesh
from jaxtyping import Array, Int, Shaped

from infinigen_jax.cache.hot_set import Replacement
from infinigen_jax.selection.select import Request

FetchedRows = tuple[Shaped[Array, "b k n w"] | None, Shaped[Array, "b k h w"] | None]


@runtime_checkable
class Transfer(Protocol):
    """Interface of a transfer; see the module's docstring.

    Attributes:
        in_place: whether `fetch` returns no rows without a hot set; attention then reads them in
            the host cache.
        concurrent: whether rows move during XLA's kernels, so that a request should be early. Only
            valid rows move then; else the whole static request, unless there is a hot set.
    """

    name: ClassVar[str]
    concurrent: ClassVar[bool]

    @property
    def in_place(self) -> bool: ...

    def fetch(
        self,
        host: Shaped[Array, "l a k t w"],
        layer: Int[Array, ""],
        request: Request,
        hot_rows: Shaped[Array, "b k h w"] | None,
        replacement: Replacement | None,
        mesh: Mesh,
    ) -> FetchedRows:
        """Move the rows of one layer's request.

        Args:
            host: host cache, in its storage dtype; bytes are moved unchanged.
            layer: index among the host layers.
            hot_rows: rows of the layer's hot set, replaced by those returned; None without one.
            replacement: entries and missing rows of the hot set; None without one.

        Returns:
            The rows in the order of the request (None if `in_place` without a hot set), and the new
            rows of the hot set. Rows beyond the request's count are undefined if
            `concurrent` or `in_place`, and else finite.
        """
        ...
