"""Transfer by a CUDA kernel that reads rows in pinned memory over PCIe, during XLA's kernels.

Only valid rows cross, each once, directly from the host cache to where attention reads them. With a
hot set, only the rows that it lacks cross.
"""

import dataclasses
import logging
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, Shaped

from infinigen_jax import cuda
from infinigen_jax.cache.host_array import CACHE_SPEC, ROWS_SPEC, kernel_slots, sharded
from infinigen_jax.cache.hot_set import Replacement
from infinigen_jax.cuda.calls import gather
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer.xla import FetchedRows, XlaTransfer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CudaTransfer:
    """Transfer by a CUDA kernel; requires `cuda.unavailable() is None`."""

    name: ClassVar[str] = "cuda"
    blocks: int = 16  # few, which leave most multiprocessors to XLA's work
    threads: int = 512  # of a block, each with four 16-byte loads in flight
    in_place: ClassVar[bool] = False
    concurrent: ClassVar[bool] = True

    def fetch(
        self,
        host: Shaped[Array, "l a k t w"],
        layer: Int[Array, ""],
        request: Request,
        hot_rows: Shaped[Array, "b k h w"] | None,
        replacement: Replacement | None,
        mesh: Mesh,
    ) -> FetchedRows:
        """Move the rows of one layer's request; see `XlaTransfer.fetch`."""
        directory = () if replacement is None else (hot_rows, replacement.entry, replacement.miss)

        def local(host: Array, layer: Array, slots: Array, count: Array, *hot: Any) -> FetchedRows:
            slots = kernel_slots(host, layer, slots)
            return gather(host, layer, slots, count, *hot, blocks=self.blocks, threads=self.threads)

        arrays = (host, layer, request.slots, request.count, *directory)
        specs = CACHE_SPEC, PartitionSpec(), *[ROWS_SPEC] * (len(arrays) - 2)
        out = ROWS_SPEC, None if replacement is None else ROWS_SPEC
        return sharded(local, mesh, specs, out)(*arrays)


Transfer = XlaTransfer | CudaTransfer


def make_transfer(name: str) -> Transfer:
    """Return the transfer with this command-line name, one of `settings.engine.TRANSFERS`.

    "auto" is `cuda` on NVIDIA GPUs; if that cannot run, a warning says why, and `xla` is used.
    """
    backend = jax.default_backend()
    xla = XlaTransfer(in_place=backend == "cpu")
    if name == "xla" or (name == "auto" and backend != "gpu"):
        return xla
    if reason := cuda.unavailable():
        logger.warning("transfer cuda: %s; using xla instead", reason)
        return xla
    return CudaTransfer()
