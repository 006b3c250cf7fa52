"""Comparison of the CUDA kernels with a reference on this machine's GPU, in small cases.

    python -m infinigen_jax.check_kernels

It prints a line for each kernel. The exit status is 0 if all agree, 1 if one does not, and 2 if
they cannot be checked on this machine. Success is remembered (`cuda.first_use`). The reference is
XLA on the CPU, which orders equal entries as the kernels do; for gathers it is NumPy.
"""

import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from infinigen_jax import cuda
from infinigen_jax.cache.host_array import allocate_host, default_mesh, write_span
from infinigen_jax.cache.hot_set import HotSet, Replacement, replacement
from infinigen_jax.cache.layers import Slots
from infinigen_jax.cuda import calls, first_use, scoring
from infinigen_jax.errors import InputError, Parser, run_command
from infinigen_jax.machine.backend import start_backend
from infinigen_jax.ops.attention import Softmax, packed, softmax_over
from infinigen_jax.ops.span import Span
from infinigen_jax.selection.select import (
    Request,
    Rest,
    budget_fraction,
    budget_rows,
    group_rank,
    select,
)
from infinigen_jax.speculation.index import IndexFormat
from infinigen_jax.transfer.cuda import CudaTransfer

LAYERS, CAPACITY = 3, 2000  # of the host cache
SLOTS = Slots(4, 32, 64)
TRANSFER = CudaTransfer()

Fetch = tuple[Array, Request, Array | None, Replacement | None]
"""A layer, the request, and the hot set's rows and replacement or None."""
Compared = tuple[Any, Any, float]
"""Arrays that a kernel computed, the reference arrays, and the absolute tolerance."""


def random_host(b: int, k: int, w: int, dtype: Any) -> tuple[np.ndarray, Array]:
    """Return small random numbers [l, b, k, t, w] and a pinned cache of them, written by layer."""
    shape, mesh = (LAYERS, b, k, CAPACITY, w), default_mesh()
    stored = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    cache = allocate_host(shape, dtype, mesh)
    whole = Span.whole(b, CAPACITY)
    write = jax.jit(lambda cache, i, x: write_span(cache, i, x, whole, mesh), donate_argnums=0)
    for layer in range(LAYERS):
        cache = write(cache, jnp.int32(layer), jnp.asarray(stored[layer]))
    return stored, cache


def random_request(b: int, k: int, n: int, slots: int, seed: int) -> Request:
    """Return a request of up to n of the first `slots` slots, ascending."""
    random = np.random.default_rng(seed)
    count = random.integers(0, n + 1, (b, k)).astype(np.int32)
    slot_numbers = np.zeros((b, k, n), np.int32)
    for i in np.ndindex(b, k):
        slot_numbers[i][: count[i]] = np.sort(random.permutation(slots)[: count[i]])
    return Request(jnp.asarray(slot_numbers), jnp.asarray(count))


def on_cpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function on the CPU and return NumPy arrays."""
    device = jax.devices("cpu")[0]
    cpu_arguments = jax.device_put(arguments, device)
    with jax.default_device(device):
        return jax.tree.map(np.asarray, jax.jit(function)(*cpu_arguments))


@functools.partial(jax.jit, static_argnums=0)
def move(transfer: CudaTransfer, host: Array, fetch: Fetch) -> list[Array]:
    """Return the rows of a fetch, padded with zeros, and the hot rows."""
    layer, request, hot, where = fetch
    rows, hot = transfer.fetch(host, layer, request, hot, where, default_mesh())
    assert rows is not None
    rows = jnp.where(request.valid[..., None], rows, 0)
    return [rows] if hot is None else [rows, hot]


def fetched(stored: np.ndarray, fetch: Fetch) -> list[np.ndarray]:
    """Return the rows of a fetch, padded with zeros, and the hot rows, with NumPy."""
    layer, request, hot, where = jax.tree.map(np.asarray, fetch)
    rows = np.take_along_axis(stored[layer], request.slots[..., None], axis=2)
    if hot is not None:
        hot = hot.copy()
        for i in np.ndindex(request.count.shape):
            miss, entry = where.miss[i], where.entry[i]
            rows[i][~miss] = hot[i][entry[~miss]]
            hot[i][entry[miss]] = rows[i][miss]
    rows[np.arange(rows.shape[2]) >= request.count[..., None]] = 0
    return [rows] if hot is None else [rows, hot]


def gathered(
    b: int, k: int, n: int, w: int, dtype: Any, steps: int = 4, transfer: CudaTransfer = TRANSFER
) -> Iterator[Compared]:
    """Compare rows gathered from the host, from another layer in each step."""
    stored, host = random_host(b, k, w, dtype)
    for step in range(steps):
        request = random_request(b, k, n, CAPACITY, step)
        fetch: Fetch = jnp.int32(step % LAYERS), request, None, None
        yield move(transfer, host, fetch), fetched(stored, fetch), 0


def gathered_hot(b: int, k: int, n: int, w: int, dtype: Any, steps: int = 4) -> Iterator[Compared]:
    """Compare rows gathered from the host and from a hot set that fills over the steps."""
    stored, host = random_host(b, k, w, dtype)
    hot = HotSet.empty(b, k, 2 * n, w, CAPACITY, dtype)
    for step in range(steps):
        request = random_request(b, k, n, 4 * n, step)
        directory, where = on_cpu(replacement, hot, request, jnp.full(b, step, jnp.int32))
        fetch = jnp.int32(1), request, hot.rows, where
        expected = fetched(stored, fetch)
        yield move(TRANSFER, host, fetch), expected, 0
        # Other values than on the host reveal where a row comes from.
        hot = directory._replace(rows=100 - jnp.asarray(expected[1]))


def selected(
    b: int, k: int, g: int, t: int, budget: float, alpha: float, tied: bool = False
) -> Iterator[Compared]:
    """Compare the selection of rows by score."""
    random, shape = np.random.default_rng(0), (b, k, g, t)
    draw = random.integers(0, 3, shape) if tied else random.normal(0, 2, shape)
    scores = jnp.asarray(draw, jnp.float32)
    positions = jnp.asarray(random.integers(t // 2, t, b), jnp.int32)
    share = budget_fraction(budget).as_integer_ratio()
    size = t * share[0] // share[1]

    def by_kernel(scores: Array, positions: Array) -> tuple[Array, Array]:
        most = budget_rows(budget, positions)
        return calls.select_rows(scores, positions, most, size, alpha, SLOTS.sinks, SLOTS.window)

    def by_xla(scores: Array, positions: Array) -> tuple[Request, Array]:
        eligible = SLOTS.eligible(positions, t)
        chosen = select(scores, eligible, alpha, budget_rows(budget, positions), size)
        return chosen, group_rank(jnp.where(eligible[:, None, None], scores, -jnp.inf))

    slots, count = (np.asarray(x) for x in jax.jit(by_kernel)(scores, positions))
    expected, rank = on_cpu(by_xla, scores, positions)
    yield count, expected.count, 0
    valid = np.arange(size) < count[..., None]
    ascending = (np.diff(slots, axis=-1, prepend=-1) > 0) & (slots < t)
    yield np.where(valid, ascending, slots == 0), np.ones_like(valid), 0
    if g == 1:
        yield slots, expected.slots, 0
    # The last bits of a group's rank depend on the order of summation, so other rows of equal rank
    # may be selected.
    kernel_ranks, reference_ranks = (
        np.sort(np.where(valid, np.take_along_axis(rank, x, axis=2), -np.inf))
        for x in (slots, expected.slots)
    )
    yield kernel_ranks, reference_ranks, 1e-5


def replaced(
    wide: bool, b: int, k: int, n: int, h: int, t: int, slots: int, steps: int = 4
) -> Iterator[Compared]:
    """Compare the hot set's replacement and directory, carried over the steps."""
    hot = HotSet.empty(b, k, h, 8, t, jnp.float32)
    if wide:
        hot = hot._replace(place=hot.place.astype(jnp.int32))
    directory = tuple(jnp.copy(x) for x in (hot.slots, hot.used, hot.place))
    by_kernel = jax.jit(calls.replace_entries, donate_argnums=(3, 4, 5))
    for step in range(steps):
        request, positions = random_request(b, k, n, slots, step), jnp.full(b, step, jnp.int32)
        hot, where = on_cpu(replacement, hot, request, positions)
        entry, miss, *directory = by_kernel(request.slots, request.count, positions, *directory)
        yield (Replacement(entry, miss), directory), (where, [hot.slots, hot.used, hot.place]), 0


class XlaIndex(IndexFormat):
    """An index that only XLA scores."""

    @property
    def by_kernel(self) -> bool:
        return False


def scored(b: int, k: int, g: int, r: int, t: int) -> Iterator[Compared]:
    """Compare the scores of every slot by an index of random keys."""
    index, query, entries = _index(b, k, g, r, t)
    yield jax.jit(scoring.index_scores)(query, entries), on_cpu(index.scores, query, entries), 1e-4


def left(b: int, k: int, g: int, r: int, t: int) -> Iterator[Compared]:
    """Compare the remaining scores, by block, after a request."""
    index, query, entries = _index(b, k, g, r, t)
    request = random_request(b, k, t // 10, t, 0)
    positions = jnp.asarray(np.linspace(t - 1, t // 3, b), jnp.int32)

    def by_kernel(
        query: Array, entries: Array, request: Request, positions: Array, columns: int
    ) -> Rest:
        sizes = (SLOTS.blocks(t), SLOTS.sinks, SLOTS.window, columns)
        slots, count = request.slots, request.count
        return scoring.index_rest(query, entries, positions, slots, count, *sizes)

    operands = query, entries, request, positions
    for columns in (0, *scoring.LEADING):
        reference = functools.partial(index.log_rest, slots=SLOTS, columns=columns)
        rest = jax.jit(functools.partial(by_kernel, columns=columns))(*operands)
        yield rest, on_cpu(reference, *operands), 1e-4


def _index(
    b: int, k: int, g: int, r: int, t: int
) -> tuple[XlaIndex, Float[Array, "b k g r"], UInt32[Array, "b k e t"]]:
    """Return an index format, a query, and the index entries of a key in every slot."""
    random, index = np.random.default_rng(0), XlaIndex("int4", r)
    query = jnp.asarray(random.normal(0, 1, (b, k, g, r)), jnp.float32)
    keys = random.normal(0, 1, (b, k, r, t)).astype(np.float32)
    return index, query, jnp.asarray(on_cpu(index.encode, keys))


def attended(
    b: int, k: int, g: int, d: int, n: int, cap: float | None = None
) -> Iterator[Compared]:
    """Compare the attention to requested rows; the first request is empty, padding is NaN."""
    random, request = np.random.default_rng(0), random_request(b, k, n, n, 0)
    request = request._replace(count=request.count.at[0, 0].set(0))
    q = jnp.asarray(random.normal(0, 1, (b, k, g, d)), jnp.float32)
    rows = jnp.asarray(random.normal(0, 1, (b, k, n, 2 * d)), jnp.bfloat16)

    def by_kernel(q: Array, rows: Array, request: Request) -> Softmax:
        rows = jnp.where(request.valid[..., None], rows, jnp.nan)
        return calls.attend_rows(q, rows, request.count, cap)

    def by_xla(q: Array, rows: Array, request: Request) -> Softmax:
        return softmax_over(q, packed(rows.astype(jnp.float32), request.valid), cap)

    result, expected = jax.jit(by_kernel)(q, rows, request), on_cpu(by_xla, q, rows, request)
    yield result, expected, 1e-3


_case = functools.partial
CASES: dict[str, tuple[Callable[[], Iterator[Compared]], ...]] = {
    "gather_rows": (
        _case(gathered, 1, 2, 50, 144, jnp.uint8),
        _case(gathered, 2, 4, 100, 64, jnp.bfloat16),
    ),
    "gather_rows_hot": (_case(gathered_hot, 2, 4, 100, 64, jnp.bfloat16),),
    "select_rows": (
        _case(selected, 2, 2, 1, 3000, 0.1, math.inf, tied=True),
        _case(selected, 2, 2, 4, 3000, 0.1, 4.0),
    ),
    "replace_entries_16": (_case(replaced, False, 2, 3, 150, 350, 1500, 600),),
    "replace_entries_32": (_case(replaced, True, 2, 3, 150, 350, 1500, 600),),
    "index_scores": (_case(scored, 2, 2, 7, 30, 640),),
    "index_rest": (_case(left, 2, 2, 7, 30, 640),),
    "attend_rows": (_case(attended, 2, 2, 7, 80, 600, 2.0), _case(attended, 2, 2, 4, 128, 600)),
}
"""Cases of each kernel of `launch.KERNELS`."""


def difference(compared: Iterable[Compared]) -> str | None:
    """Return a line that describes the first difference; None if all agree."""
    for computed, expected, tolerance in compared:
        leaves = (map(np.asarray, jax.tree.leaves(tree)) for tree in (computed, expected))
        for x, y in zip(*leaves, strict=True):
            same = np.isclose(x, y, rtol=0, atol=tolerance) if tolerance else x == y
            if not same.all():
                return f"{np.sum(~same)} of {same.size} numbers are not the reference's"
    return None


def check() -> int:
    """Run all cases, print the results and return the exit status."""
    given = os.environ.get("JAX_PLATFORMS", "")
    if given and "cpu" not in given.split(","):
        jax.config.update("jax_platforms", f"{given},cpu")  # for the reference
    start_backend()
    if reason := cuda.load():
        raise InputError(f"the CUDA kernels cannot be checked: {reason}")
    wrong, usable = [], True
    for kernel, cases in CASES.items():
        try:
            failure = difference(itertools.chain.from_iterable(case() for case in cases))
        except Exception as error:  # a broken kernel may raise anything
            failure, usable = f"{type(error).__name__}: {' '.join(str(error).split())}", False
        print(f"{kernel}: {failure or 'as the reference'}", flush=True)
        wrong += [f"{kernel}: {failure}"] if failure else []
        if not usable:  # as a GPU is after an error
            break
    if wrong:
        print(f"error: the CUDA kernels do not work here: {'; '.join(wrong)}", file=sys.stderr)
        return 1
    first_use.remember(jax.local_devices()[0])
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m infinigen_jax.check_kernels",
        description="Compare the CUDA kernels' results with XLA's on this machine's GPU.",
    )

    def run() -> int:
        parser.parse_args(argv)
        return check()

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
