"""Transfer by a kernel of our own, which reads rows in pinned memory over PCIe beside XLA's work.

    XLA's stream   speculation, start | attention, MLP ...     | wait | next layer ...
    own stream                        | gather ............... |

Only rows that are meant cross, each once, straight from the host cache to where attention reads
it; with a hot set, only those that it does not have.
"""

import dataclasses
import logging
from typing import Any, ClassVar

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax import cuda
from infinigen_jax.cache.host_array import CACHE_SPEC, ROWS_SPEC, kernel_slots
from infinigen_jax.cache.hot_set import Plan
from infinigen_jax.cuda.calls import Gather, await_gather, start_gather
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer.xla import XlaTransfer, xla_transfer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A gather and the mesh it runs on."""

    gather: Gather
    mesh: Mesh


jax.tree_util.register_dataclass(Ticket, data_fields=["gather"], meta_fields=["mesh"])


@dataclasses.dataclass(frozen=True)
class CudaTransfer:
    """See the module's docstring; needs `cuda.unavailable() is None` to run.

    Attributes:
        blocks: of the kernel, at most: few, so that most multiprocessors are left to XLA's work.
        threads: of a block; each has four 16-byte loads in flight.
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
        plan: Plan | None,
        mesh: Mesh,
    ) -> Ticket:
        directory = () if plan is None else (hot_rows, plan.entry, plan.miss)

        def local(host: Array, layer: Array, slots: Array, count: Array, *hot: Any) -> Gather:
            slots, hot = kernel_slots(host, layer, slots), hot or (None, None, None)
            size = {"blocks": self.blocks, "threads": self.threads}
            return start_gather(host, layer, slots, count, *hot, **size)

        arrays = (host, layer, request.slots, request.count, *directory)
        out = _gather_specs(plan is not None)
        return Ticket(_sharded(local, mesh, _specs(len(arrays)), out)(*arrays), mesh)

    def behind(self, ticket: Ticket, q: Array) -> tuple[Ticket, Array]:
        """Ties the start in front of the work that it is to run beside.

        XLA orders launches by data alone: without this, the start could come right before the wait.
        """
        gather = ticket.gather
        (rows, hot), q = lax.optimization_barrier(((gather.rows, gather.hot), q))
        return dataclasses.replace(ticket, gather=gather._replace(rows=rows, hot=hot)), q

    def wait(
        self, ticket: Ticket, x: Float[Array, "b e"]
    ) -> tuple[Float[Array, "b e"], Shaped[Array, "b k n w"], Shaped[Array, "b k h w"] | None]:
        # One barrier puts the wait behind the layer's work, the other the next layer behind the
        # wait: its own start would otherwise come first, and this wait would include it.
        gather = ticket.gather
        x, (rows, hot) = lax.optimization_barrier((x, (gather.rows, gather.hot)))
        gather = gather._replace(rows=rows, hot=hot)
        specs = _gather_specs(hot is not None)
        await_local = _sharded(await_gather, ticket.mesh, (specs,), (specs.rows, specs.hot))
        x, (rows, hot) = lax.optimization_barrier((x, await_local(gather)))
        return x, rows, hot


def cuda_transfer_or_reason() -> CudaTransfer | str:
    """The transfer, or in a line why it cannot be used in this process."""
    reason = cuda.unavailable()
    return CudaTransfer() if reason is None else reason


def best_transfer(wanted: bool) -> CudaTransfer | XlaTransfer:
    """The `cuda` transfer where it runs, else `xla`, with one warning that says why.

    Args:
        wanted: `cuda` was asked for by name; else a machine without a GPU needs no warning.
    """
    if not wanted and jax.default_backend() != "gpu":
        return xla_transfer()
    transfer = cuda_transfer_or_reason()
    if isinstance(transfer, str):
        logger.warning("transfer cuda: %s; using xla instead", transfer)
        return xla_transfer()
    return transfer


def _specs(arrays: int) -> tuple[PartitionSpec, ...]:
    """Of the host cache, the layer's number, and arrays [b, k, ...]."""
    return (CACHE_SPEC, PartitionSpec(), *[ROWS_SPEC] * (arrays - 2))


def _gather_specs(hot: bool) -> Any:
    """Of a Gather, with or without a hot set."""
    arrays: Any = (ROWS_SPEC, ROWS_SPEC if hot else None, _specs(6 if hot else 4))
    return Gather(*arrays)


def _sharded(function: Any, mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
