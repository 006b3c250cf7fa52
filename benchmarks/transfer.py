"""Transfer of rows from pinned host memory: the package's gather and a plain copy. Needs a GPU.

    python -m benchmarks.transfer

It measures row sizes, numbers of blocks and sizes of the host array, alone and together with a
computation that is bound by reading weights, as decoding is. The hidden share of a transfer is the
time that it does not add:

    hidden = (transfer alone + computation alone - both together) / transfer alone

"""

import argparse
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
from benchmarks.machine import RESULTS, note, write_json
from benchmarks.tables import entry_table
from infinigen_jax import cuda
from infinigen_jax.cache.host_array import Placement, allocate_host, default_mesh, write_span
from infinigen_jax.cuda.launch import CONCURRENT
from infinigen_jax.ops.span import Span
from infinigen_jax.planner import bandwidths
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer import Transfer

REPEATS, CALLS = 7, 10  # timed rounds, and consecutive transfers in each
SIZES = ((512, 1), (144, 1), (272, 1), (64, 1), (4096, 1), (512, 16))  # bytes of a row; GiB of all
BLOCKS = (16, 8, 4, 32, 64, 132)  # of the cuda gather
MAIN_ROW = 512  # bytes; measured with all numbers of blocks, others with the first two
GROUPS = (8, 8)  # sequences, KV heads
COUNT = math.prod(GROUPS)
MOVED_BYTES = 1 << 25  # bytes per transfer, limited by the rows of the host array
WEIGHTS = (16, 4096, 4096)  # bfloat16, 0.5 GB: more than a cache on the chip holds
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
    if jax.default_backend() == "cpu":
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
    reason = cuda.unavailable()
    result: dict[str, Any] = {
        "benchmark": "transfer",
        "machine": machine.describe(),
        "copy_bytes_per_second": bandwidths.host_to_device_bandwidth(),
        "memory_read_bytes_per_second": machine.memory_read_bandwidth(),
        "cuda_unavailable": reason,
        "measurements": [],
    }
    ways: list[tuple[Any, int | None]] = [(Transfer(), None)]
    if reason:
        note(f"without the cuda transfer: {reason}")
    else:
        ways = [*((Transfer("cuda", blocks=blocks), blocks) for blocks in BLOCKS), *ways]
    work = random_work()
    for row, gib in SIZES:
        if time.monotonic() >= deadline:
            break
        rows = make_rows(row, gib << 30)
        for transfer, blocks in ways:
            wanted = row == MAIN_ROW or blocks in (None, *BLOCKS[:2])
            if wanted and time.monotonic() < deadline:
                entry = {"transfer": transfer.name, "blocks": blocks}
                result["measurements"].append(entry | measure_one(transfer, *rows, work))
                write_json(path, result)
        del rows
    return result


def make_rows(row: int, cache_bytes: int) -> tuple[jax.Array, Request, np.ndarray]:
    """Return a host cache of one layer with rows of `row` bytes, a request, and its rows.

    The request is for different rows of each group, in random order.
    """
    mesh, capacity = default_mesh(), cache_bytes // (COUNT * row)
    at, whole = Placement(mesh), Span.whole(GROUPS[0], capacity)

    def content(slots: Any) -> Any:
        """Return the bytes of rows, which depend on group, slot and column: [b, k, n, row]."""
        group = np.arange(COUNT).reshape(*GROUPS, 1, 1)
        columns = np.arange(row)[None, None, None]
        return (slots[..., None] * (2 * columns + 1) + 37 * group + (slots[..., None] >> 8)) % 251

    def fill(host: jax.Array) -> jax.Array:
        slots = jnp.broadcast_to(jnp.arange(capacity), (*GROUPS, capacity))
        return write_span(host, jnp.int32(0), content(slots).astype(jnp.uint8), whole, mesh)

    host = allocate_host((1, *GROUPS, capacity, row), jnp.uint8, mesh)
    host = jax.jit(fill, donate_argnums=0, out_shardings=at.host)(host)
    wanted = max(1, min(capacity // 4, MOVED_BYTES // (COUNT * row)))
    slots = np.broadcast_to(np.arange(capacity, dtype=np.int32), (*GROUPS, capacity))
    slots = np.random.default_rng(0).permuted(slots, axis=-1)[..., :wanted]
    count = np.full(GROUPS, wanted, np.int32)
    request = Request(jax.device_put(slots, at.rows), jax.device_put(count, at.rows))
    return host, request, content(slots).astype(np.uint8)


def random_work(shape: tuple[int, int, int] = WEIGHTS) -> tuple[jax.Array, jax.Array]:
    """Return a few rows, and the matrices that they are multiplied with, one after another."""
    keys = jax.random.split(jax.random.key(1))
    x = jax.random.normal(keys[0], (GROUPS[0], shape[1]), jnp.bfloat16)
    return x, jax.random.normal(keys[1], shape, jnp.bfloat16) * shape[1] ** -0.5


@functools.partial(jax.jit, static_argnums=2)
def _work(x: jax.Array, weights: jax.Array, times: int) -> jax.Array:
    for i in range(times * weights.shape[0]):
        x = x @ weights[i % weights.shape[0]]
    return x


def measure_one(
    transfer: Any,
    host: jax.Array,
    request: Request,
    expected: np.ndarray,
    work: tuple[jax.Array, jax.Array],
) -> dict[str, Any]:
    """Measure one row size and transfer: alone, the computation alone, and both.

    Return only an `error` if the transfer does not return the expected rows.
    """
    mesh, layer, row = default_mesh(), jnp.int32(0), expected.shape[-1]

    def move(host: jax.Array, request: Request) -> jax.Array:
        return transfer.fetch(host, layer, request, None, None, mesh)[0]

    def both(host: jax.Array, request: Request, x: jax.Array, weights: jax.Array, times: int):
        return lax.optimization_barrier((_work(x, weights, times), move(host, request)))

    options = CONCURRENT if transfer.name == "cuda" else None
    alone, together = jax.jit(move), jax.jit(both, static_argnums=4, compiler_options=options)
    if not np.array_equal(np.asarray(alone(host, request)), expected):
        note(f"wrong rows by {transfer.name}, of {row} bytes")
        return {"row_bytes": row, "error": "wrong rows"}
    moving = _seconds(lambda: alone(host, request))
    once = _seconds(lambda: _work(*work, 1))
    # About one and a half times as long as the transfer, so that it can be hidden.
    times = max(1, min(8, round(1.5 * statistics.median(moving) / statistics.median(once))))
    computing = _seconds(lambda: _work(*work, times))
    joined = _seconds(lambda: together(host, request, *work, times))
    transfer_s, compute_s, both_s = (statistics.median(s) for s in (moving, computing, joined))
    return {
        "row_bytes": row,
        "cache_bytes": host.nbytes,
        "rows": expected.size // row,
        "bytes": expected.nbytes,
        "bytes_per_second": expected.nbytes / transfer_s,
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
        jax.block_until_ready([run() for _ in range(CALLS)])
        rounds.append((time.perf_counter() - start) / CALLS)
    return rounds


def table(result: dict[str, Any]) -> str:
    copy = result["copy_bytes_per_second"]
    entries = [
        entry | {"share_of_copy": entry["bytes_per_second"] / copy}
        for entry in result["measurements"]
        if "error" not in entry
    ]
    head = f"{result['machine']['device']}; a copy from pinned memory: {copy / 1e9:.1f} GB/s"
    return f"{head}\n\n{entry_table(COLUMNS, entries)}"


if __name__ == "__main__":
    sys.exit(main())
