"""Transfer by a CUDA kernel that reads rows in pinned memory over PCIe, concurrently with XLA.

    XLA's stream     speculation, start | attention, MLP ...     | wait | next layer ...
    kernel's stream                     | gather ............... |

Only valid rows cross, each once, directly from the host cache to where attention reads them. With a
hot set, only the rows that it lacks cross.
"""

import dataclasses
import logging
from typing import Any, ClassVar

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax import cuda
from infinigen_jax.cache.host_array import CACHE_SPEC, ROWS_SPEC, kernel_slots, sharded
from infinigen_jax.cache.hot_set import Replacement
from infinigen_jax.cuda.calls import Gather, await_gather, start_gather
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer.xla import XlaTransfer, xla_transfer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Ticket:
    """Gather under way, and the mesh it runs on."""

    gather: Gather
    mesh: Mesh


jax.tree_util.register_dataclass(Ticket, data_fields=["gather"], meta_fields=["mesh"])


@dataclasses.dataclass(frozen=True)
class CudaTransfer:
    """Transfer by a CUDA kernel; requires `cuda.unavailable() is None`. See the module's docstring.

    Attributes:
        blocks: most blocks of the kernel; few, to leave most multiprocessors to XLA's work.
        threads: threads per block; each has four 16-byte loads in flight.
    """

    name: ClassVar[str] = "cuda"
    blocks: int = 16
    threads: int = 512
    masks: bool = True
    in_place: bool = False

    def start(
        self,
        host: Shaped[Array, "l a k t w"],
        layer: Int[Array, ""],
        request: Request,
        hot_rows: Shaped[Array, "b k h w"] | None,
        replacement: Replacement | None,
        mesh: Mesh,
    ) -> Ticket:
        directory = () if replacement is None else (hot_rows, replacement.entry, replacement.miss)

        def local(host: Array, layer: Array, slots: Array, count: Array, *hot: Any) -> Gather:
            slots, hot = kernel_slots(host, layer, slots), hot or (None, None, None)
            size = {"blocks": self.blocks, "threads": self.threads}
            return start_gather(host, layer, slots, count, *hot, **size)

        arrays = (host, layer, request.slots, request.count, *directory)
        out = _gather_specs(replacement is not None)
        return Ticket(sharded(local, mesh, _specs(len(arrays)), out)(*arrays), mesh)

    def order(self, ticket: Ticket, q: Array) -> tuple[Ticket, Array]:
        """Order the start before the work that it should overlap with.

        XLA orders launches by data dependencies alone. Without this one the start could be launched
        directly before the wait.
        """
        gather = ticket.gather
        (rows, hot), q = lax.optimization_barrier(((gather.rows, gather.hot), q))
        return dataclasses.replace(ticket, gather=gather._replace(rows=rows, hot=hot)), q

    def wait(
        self, ticket: Ticket, x: Float[Array, "b e"]
    ) -> tuple[Float[Array, "b e"], Shaped[Array, "b k n w"], Shaped[Array, "b k h w"] | None]:
        # The first barrier orders the wait after the layer's work. The second orders the next layer
        # after the wait: its start could otherwise come first, and this wait would include it.
        gather = ticket.gather
        x, (rows, hot) = lax.optimization_barrier((x, (gather.rows, gather.hot)))
        gather = gather._replace(rows=rows, hot=hot)
        specs = _gather_specs(hot is not None)
        await_local = sharded(await_gather, ticket.mesh, (specs,), (specs.rows, specs.hot))
        x, (rows, hot) = lax.optimization_barrier((x, await_local(gather)))
        return x, rows, hot


def best_transfer(requested: bool) -> CudaTransfer | XlaTransfer:
    """Return the `cuda` transfer if it runs, else `xla` with one warning that states the reason.

    Args:
        requested: whether `cuda` was requested by name; if not, a machine without a GPU gets no
            warning.
    """
    if not requested and jax.default_backend() != "gpu":
        return xla_transfer()
    if reason := cuda.unavailable():
        logger.warning("transfer cuda: %s; using xla instead", reason)
        return xla_transfer()
    return CudaTransfer()


def _specs(arrays: int) -> tuple[PartitionSpec, ...]:
    """Return the specs of the host cache, the layer's index, and arrays [b, k, ...]."""
    return (CACHE_SPEC, PartitionSpec(), *[ROWS_SPEC] * (arrays - 2))


def _gather_specs(hot: bool) -> Any:
    """Return the specs of a Gather, with or without a hot set."""
    arrays: Any = (ROWS_SPEC, ROWS_SPEC if hot else None, _specs(6 if hot else 4))
    return Gather(*arrays)
