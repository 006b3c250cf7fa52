"""Transfer of rows from pinned host memory: the package's gather and a plain copy. Needs a GPU.

    python -m benchmarks.transfer

It measures row sizes, numbers of blocks and sizes of the host array, alone and together with a
computation that is bound by reading weights, as decoding is. The hidden share of a transfer is the
time that it does not add:

    hidden = (transfer alone + computation alone - both together) / transfer alone

"""

import argparse
import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import machine
from benchmarks.files import RESULTS, note, write_json
from benchmarks.tables import entry_table
from infinigen_jax import cuda
from infinigen_jax.cache.host_array import Placement, allocate_host, default_mesh, write_span
from infinigen_jax.cuda.launch import CONCURRENT
from infinigen_jax.ops.span import Span
from infinigen_jax.planner import bandwidths
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer import XlaTransfer

REPEATS, CALLS = 7, 10  # timed rounds, and consecutive transfers in each
SIZES = ((512, 1), (144, 1), (272, 1), (64, 1), (4096, 1), (512, 16))  # bytes of a row; GiB of all
BLOCKS = (16, 8, 4, 32, 64, 132)  # of the cuda gather
MAIN_ROW = 512  # bytes; measured with all numbers of blocks, others with the first two
GROUPS = (8, 8)  # sequences, KV heads
COUNT = math.prod(GROUPS)
MOVED_BYTES = 1 << 25  # bytes per transfer, limited by the rows of the host array
WEIGHTS = (16, 4096, 4096)  # bfloat16, 0.5 GB: more than a cache on the chip holds


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of one measurement: bytes per row, slots per group, and rows requested per group."""

    row: int
    capacity: int
    wanted: int

    @classmethod
    def of(cls, row: int, cache_bytes: int) -> "Shape":
        capacity, moved = cache_bytes // (COUNT * row), MOVED_BYTES // (COUNT * row)
        return cls(row, capacity, max(1, min(capacity // 4, moved)))

    @property
    def moved(self) -> int:
        """Bytes of all requested rows."""
        return COUNT * self.wanted * self.row

    @property
    def cache_bytes(self) -> int:
        """Bytes of the host array."""
        return COUNT * self.capacity * self.row

    def host(self) -> jax.Array:
        """Return a host cache of one layer that holds `content`."""
        mesh = default_mesh()
        host = allocate_host((1, *GROUPS, self.capacity, self.row), jnp.uint8, mesh)
        whole = Span.whole(GROUPS[0], self.capacity)

        def fill(host: jax.Array) -> jax.Array:
            slots = jnp.broadcast_to(jnp.arange(self.capacity), (*GROUPS, self.capacity))
            rows = self.content(slots).astype(jnp.uint8)
            return write_span(host, jnp.int32(0), rows, whole, mesh)

        return jax.jit(fill, donate_argnums=0, out_shardings=Placement(mesh).host)(host)

    def content(self, slots: Any) -> Any:
        """Return the bytes of rows, which depend on group, slot and column: [b, k, n, row]."""
        group = np.arange(COUNT).reshape(*GROUPS, 1, 1)
        columns = np.arange(self.row)[None, None, None]
        return (slots[..., None] * (2 * columns + 1) + 37 * group + (slots[..., None] >> 8)) % 251

    def request(self) -> Request:
        """Return a request for different rows of each group, in random order."""
        slots = np.broadcast_to(np.arange(self.capacity, dtype=np.int32), (*GROUPS, self.capacity))
        slots = np.random.default_rng(0).permuted(slots, axis=-1)[..., : self.wanted]
        count = np.full(GROUPS, self.wanted, np.int32)
        at = Placement(default_mesh()).rows
        return Request(jax.device_put(slots, at), jax.device_put(count, at))


def random_work(shape: tuple[int, int, int] = WEIGHTS) -> tuple[jax.Array, jax.Array]:
    """Return a few rows, and the matrices that they are multiplied with, one after another."""
    keys = jax.random.split(jax.random.key(1))
    x = jax.random.normal(keys[0], (GROUPS[0], shape[1]), jnp.bfloat16)
    return x, jax.random.normal(keys[1], shape, jnp.bfloat16) * shape[1] ** -0.5


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer", description="Measure moving rows to a GPU."
    )
    add = parser.add_argument
    add("--cap-seconds", type=float, default=math.inf, help="time after which nothing starts")
    add("--json", type=Path, help="result file (default: benchmarks/results/gpu/transfer.json)")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    if not machine.has_gpu():
        print("benchmarks.transfer measures an NVIDIA GPU, and here is none", file=sys.stderr)
        return 2
    path = options.json or RESULTS / "gpu" / "transfer.json"
    result = measure(options, path)
    print(table(result))
    note(f"written to {path}")
    return int(any("error" in entry for entry in result["measurements"]))


def measure(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Measure all row sizes and numbers of blocks; the file is written as it grows."""
    deadline = time.monotonic() + options.cap_seconds
    result: dict[str, Any] = {
        "benchmark": "transfer",
        "machine": machine.describe(),
        "copy_bytes_per_second": bandwidths.host_to_device_bandwidth(),
        "memory_read_bytes_per_second": machine.memory_read_bandwidth(),
        "cuda_unavailable": None,
        "measurements": [],
    }
    ways: list[tuple[Any, int | None]] = [(XlaTransfer(), None)]
    if reason := cuda.unavailable():
        result["cuda_unavailable"] = reason
        note(f"without the cuda transfer: {reason}")
    else:
        from infinigen_jax.transfer.cuda import CudaTransfer

        gathers = [(CudaTransfer(blocks=blocks), blocks) for blocks in BLOCKS]
        ways = [*gathers, *ways]
    work = random_work()
    for row, gib in SIZES:
        if time.monotonic() >= deadline:
            break
        shape = Shape.of(row, gib << 30)
        host, request = shape.host(), shape.request()
        expected = shape.content(np.asarray(request.slots)).astype(np.uint8)
        for transfer, blocks in ways:
            wanted = row == MAIN_ROW or blocks in (None, *BLOCKS[:2])
            if wanted and time.monotonic() < deadline:
                entry = {"transfer": transfer.name, "blocks": blocks}
                entry |= measure_one(transfer, shape, host, request, expected, work)
                result["measurements"].append(entry)
                write_json(path, result)
        del host
    return result


@functools.partial(jax.jit, static_argnums=2)
def _work(x: jax.Array, weights: jax.Array, times: int) -> jax.Array:
    for i in range(times * weights.shape[0]):
        x = x @ weights[i % weights.shape[0]]
    return x


def measure_one(
    transfer: Any,
    shape: Shape,
    host: jax.Array,
    request: Request,
    expected: np.ndarray,
    work: tuple[jax.Array, jax.Array],
) -> dict[str, Any]:
    """Measure one row size and transfer: alone, the computation alone, and both.

    Return only an `error` if the transfer does not return the expected rows.
    """
    mesh, layer = default_mesh(), jnp.int32(0)

    def move(host: jax.Array, request: Request) -> jax.Array:
        return transfer.fetch(host, layer, request, None, None, mesh)[0]

    def both(host: jax.Array, request: Request, x: jax.Array, weights: jax.Array, times: int):
        return lax.optimization_barrier((_work(x, weights, times), move(host, request)))

    options = CONCURRENT if transfer.name == "cuda" else None
    alone, together = jax.jit(move), jax.jit(both, static_argnums=4, compiler_options=options)
    x, weights = work
    rows = np.asarray(alone(host, request))
    if not np.array_equal(rows, expected):
        note(f"wrong rows by {transfer.name}, of {shape.row} bytes")
        return {"row_bytes": shape.row, "error": "wrong rows"}
    moving = _seconds(lambda: alone(host, request))
    once = _seconds(lambda: _work(x, weights, 1))
    # About one and a half times as long as the transfer, so that it can be hidden.
    times = max(1, min(8, round(1.5 * statistics.median(moving) / statistics.median(once))))
    computing = _seconds(lambda: _work(x, weights, times))
    joined = _seconds(lambda: together(host, request, x, weights, times))
    transfer_s, compute_s, both_s = (statistics.median(s) for s in (moving, computing, joined))
    return {
        "row_bytes": shape.row,
        "cache_bytes": shape.cache_bytes,
        "rows": shape.moved // shape.row,
        "bytes": shape.moved,
        "bytes_per_second": shape.moved / transfer_s,
        "transfer_ms": 1e3 * transfer_s,
        "compute_ms": 1e3 * compute_s,
        "both_ms": 1e3 * both_s,
        "hidden_share": (transfer_s + compute_s - both_s) / transfer_s,
        "round_seconds": {"transfer": moving, "compute": computing, "both": joined},
    }


def _seconds(run: Callable[[], Any]) -> list[float]:
    """Return the seconds per call of several consecutive calls, after a warm-up."""
    jax.block_until_ready(run())
    rounds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        results = [run() for _ in range(CALLS)]
        jax.block_until_ready(results)
        rounds.append((time.perf_counter() - start) / CALLS)
    return rounds


COLUMNS = {
    "row, bytes": ("row_bytes", "{}"),
    "cache, bytes": ("cache_bytes", "{:.3g}"),
    "transfer": ("transfer", "{}"),
    "blocks": ("blocks", "{}"),
    "bytes/s": ("bytes_per_second", "{:.3g}"),
    "of copy": ("share_of_copy", "{:.2f}"),
    "ms": ("transfer_ms", "{:.3f}"),
    "compute ms": ("compute_ms", "{:.3f}"),
    "both ms": ("both_ms", "{:.3f}"),
    "hidden": ("hidden_share", "{:.2f}"),
}


def table(result: dict[str, Any]) -> str:
    """Format the result in Markdown."""
    copy = result["copy_bytes_per_second"]
    entries = [
        entry | ({"share_of_copy": entry["bytes_per_second"] / copy} if copy else {})
        for entry in result["measurements"]
        if "error" not in entry
    ]
    named = f"{copy / 1e9:.1f} GB/s" if copy else "unknown"
    head = f"{result['machine']['device']}; a copy from pinned memory: {named}"
    return f"{head}\n\n{entry_table(COLUMNS, entries)}"


if __name__ == "__main__":
    sys.exit(main())
