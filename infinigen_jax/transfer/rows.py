"""Transfer of requested rows from the host cache to the device."""

import dataclasses
import logging
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int, Shaped

from infinigen_jax import cuda
from infinigen_jax.cache.host_array import (
    CACHE_SPEC,
    ROWS_SPEC,
    gather_rows,
    kernel_slots,
    sharded,
)
from infinigen_jax.cache.hot_set import Replacement
from infinigen_jax.cuda.calls import gather
from infinigen_jax.ops.compaction import compact
from infinigen_jax.ops.indexing import look_up, put
from infinigen_jax.selection.select import Request

logger = logging.getLogger(__name__)

FetchedRows = tuple[Shaped[Array, "b k n w"] | None, Shaped[Array, "b k h w"] | None]

CHUNK = 64  # missing rows per KV head moved into a hot set in one iteration


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Transfer by XLA alone, the reference, or by a CUDA kernel.

    "xla", for all backends, is a gather in host memory, then an asynchronous copy. Without a hot
    set every row of the request moves, including padding. With a hot set missing rows move in
    chunks, as many for all KV heads as the one that misses most needs. On a GPU that loop reads its
    length back to the host.

    The kernel of "cuda" reads rows in pinned memory over PCIe, during XLA's kernels. Only valid
    rows that a hot set lacks cross, each once, directly to where attention reads them. It requires
    `cuda.unavailable() is None`.

    Attributes:
        name: "xla" or "cuda".
        in_place: whether no rows move without a hot set, and attention reads valid rows in the host
            cache. For "xla" on the CPU, where host and device share memory.
        blocks: those of the kernel: few, which leave most multiprocessors to XLA's work.
        threads: those of a block, each with four 16-byte loads in flight.
    """

    name: str = "xla"
    in_place: bool = False
    blocks: int = 16
    threads: int = 512

    @property
    def concurrent(self) -> bool:
        """Whether rows move during XLA's kernels, so that a request should be early.

        Only valid ones move then; otherwise the whole static request, unless a hot set is used.
        """
        return self.name == "cuda"

    def fetch(
        self,
        host: Shaped[Array, "l a k t w"],
        layer: Int[Array, ""],
        request: Request,
        hot_rows: Shaped[Array, "b k h w"] | None,
        replacement: Replacement | None,
        mesh: Mesh,
    ) -> FetchedRows:
        """Move the rows of one host layer's request; bytes are moved unchanged.

        `hot_rows` are those of the layer's hot set, and `replacement` its entries and missing rows;
        None without a hot set. Return the rows in the order of the request (None if `in_place`
        without a hot set), and the new rows of the hot set. Rows beyond the request's count are
        undefined if `concurrent` or `in_place`, and else finite.
        """
        if self.name == "cuda":
            hot = () if replacement is None else (hot_rows, replacement.entry, replacement.miss)
            return self._by_kernel(host, layer, request, hot, mesh)
        if hot_rows is None:
            if self.in_place:
                return None, None
            return gather_rows(host, layer, request.slots, mesh), None
        assert replacement is not None
        hot_rows = move_missing(host, layer, request.slots, hot_rows, replacement, mesh)
        rows = jnp.take_along_axis(
            hot_rows, replacement.entry[..., None], axis=2, mode="promise_in_bounds"
        )
        return rows, hot_rows

    def _by_kernel(
        self, host: Array, layer: Array, request: Request, directory: tuple[Any, ...], mesh: Mesh
    ) -> FetchedRows:
        def local(host: Array, layer: Array, slots: Array, count: Array, *hot: Any) -> FetchedRows:
            slots = kernel_slots(host, layer, slots)
            return gather(host, layer, slots, count, *hot, blocks=self.blocks, threads=self.threads)

        arrays = host, layer, request.slots, request.count, *directory
        specs = CACHE_SPEC, PartitionSpec(), *[ROWS_SPEC] * (len(arrays) - 2)
        out = ROWS_SPEC, ROWS_SPEC if directory else None
        return sharded(local, mesh, specs, out)(*arrays)


def make_transfer(name: str) -> Transfer:
    """Return the transfer with this command-line name, one of `settings.engine.TRANSFERS`.

    "auto" is `cuda` on NVIDIA GPUs; if that cannot run, a warning says why, and `xla` is used.
    """
    backend = jax.default_backend()
    xla = Transfer(in_place=backend == "cpu")
    if name == "xla" or (name == "auto" and backend != "gpu"):
        return xla
    if reason := cuda.unavailable():
        logger.warning("transfer cuda: %s; using xla instead", reason)
        return xla
    return Transfer("cuda")


def move_missing(
    host: Shaped[Array, "l a k t w"],
    layer: Int[Array, ""],
    slots: Int[Array, "b k n"],
    hot_rows: Shaped[Array, "b k h w"],
    replacement: Replacement,
    mesh: Mesh,
) -> Shaped[Array, "b k h w"]:
    """Fill the entries of the missing rows from the host, in place if donated."""
    h, n = hot_rows.shape[2], slots.shape[2]
    chunk = min(CHUNK, n)
    size = -(-n // chunk) * chunk
    counts = jnp.sum(replacement.miss, axis=-1, dtype=jnp.int32)
    # Missing rows, as indices into the request.
    place = compact(replacement.miss, size)
    missing = lax.broadcasted_iota(jnp.int32, place.shape, 2) < counts[..., None]
    slots = jnp.where(missing, look_up(slots, place), 0)
    entries = jnp.where(missing, look_up(replacement.entry, place), h)

    def move(i: Array, hot_rows: Array) -> Array:
        def cut(x: Array) -> Array:
            return lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=2)

        # The barrier keeps the scatter's reshape of its updates after the gather.
        rows = lax.optimization_barrier(gather_rows(host, layer, cut(slots), mesh))
        return put(hot_rows, cut(entries), rows)

    chunks = (jnp.max(counts) + (chunk - 1)) // chunk
    return lax.fori_loop(jnp.int32(0), chunks, move, hot_rows)
