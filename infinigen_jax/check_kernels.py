"""Comparison of the CUDA kernels with a reference on this machine's GPU, in small cases.

    python -m infinigen_jax.check_kernels

It prints a line for each kernel. The exit status is 0 if all agree, which is remembered
(`cuda.first_use`), 1 if one does not, and 2 if they cannot be checked on this machine. The
reference is XLA on the CPU, which orders equal entries as the kernels do; for gathers it is NumPy.
"""

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from infinigen_jax import cuda
from infinigen_jax.cache.host_array import allocate_host, default_mesh, write_span
from infinigen_jax.cache.hot_set import HotSet, Replacement, replacement
from infinigen_jax.cache.layers import Slots
from infinigen_jax.cuda import calls, first_use
from infinigen_jax.errors import InputError, Parser, run_command
from infinigen_jax.machine.backend import start_backend
from infinigen_jax.ops.attention import packed, softmax_over
from infinigen_jax.ops.span import Span
from infinigen_jax.selection.select import (
    Request,
    Rest,
    budget_fraction,
    budget_rows,
    group_rank,
    select,
)
from infinigen_jax.speculation.index import CODES, IndexFormat
from infinigen_jax.transfer import Transfer

LAYERS, CAPACITY = 3, 2000  # of the host cache
SLOTS = Slots(4, 32, 64)
TRANSFER = Transfer("cuda")

Fetch = tuple[Array, Request, Array | None, Replacement | None]
"""A layer, the request, and the hot set's rows and replacement or None."""
Compared = tuple[Any, Any, float]
"""Arrays that a kernel computed, the reference arrays, and the absolute tolerance."""


def random_host(
    b: int, k: int, w: int, dtype: Any, capacity: int = CAPACITY
) -> tuple[np.ndarray, Array]:
    """Return small random numbers [l, b, k, t, w] and a pinned cache of them, written by layer."""
    shape = LAYERS, b, k, capacity, w
    stored = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    cache = allocate_host(shape, dtype, default_mesh())
    for layer in range(LAYERS):
        cache = _write(cache, jnp.int32(layer), jnp.asarray(stored[layer]))
    return stored, cache


@partial(jax.jit, donate_argnums=0)
def _write(cache: Array, layer: Array, rows: Array) -> Array:
    whole = Span.whole(rows.shape[0], rows.shape[2])
    return write_span(cache, layer, rows, whole, default_mesh())


def random_request(b: int, k: int, n: int, slots: int, seed: int) -> Request:
    """Return a request of up to n of the first `slots` slots, ascending; often of none or n."""
    random = np.random.default_rng(seed)
    count = random.integers(-(n // 4), n + n // 4 + 1, (b, k)).clip(0, n).astype(np.int32)
    slot_numbers = np.zeros((b, k, n), np.int32)
    for i in np.ndindex(b, k):
        slot_numbers[i][: count[i]] = np.sort(random.permutation(slots)[: count[i]])
    return Request(jnp.asarray(slot_numbers), jnp.asarray(count))


def positions_of(b: int, t: int) -> Int[Array, " b"]:
    """Return the positions of at most three sequences: long, short and idle."""
    return jnp.asarray([t - 1, t // 3, 0][:b], jnp.int32)


def on_cpu(function: Callable[..., Any], *arguments: Any, **constants: Any) -> Any:
    """Run a function on the CPU, compiled for these constants, and return NumPy arrays."""
    device = jax.devices("cpu")[0]
    compiled = jax.jit(function, static_argnames=tuple(constants))
    with jax.default_device(device):
        return jax.tree.map(np.asarray, compiled(*jax.device_put(arguments, device), **constants))


@partial(jax.jit, static_argnums=0)
def move(transfer: Transfer, host: Array, fetch: Fetch) -> list[Array]:
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
    b: int,
    k: int,
    n: int,
    w: int,
    dtype: Any,
    steps: int = 4,
    transfer: Transfer = TRANSFER,
    capacity: int = CAPACITY,
    spare: int | None = None,
    seed: int = 0,
) -> Iterator[Compared]:
    """Compare rows gathered from the host, from another layer in each step.

    With a hot set of `n + spare` rows, all rows are missing there in the first step, none in the
    third, and half of them in the others.
    """
    stored, host = random_host(b, k, w, dtype, capacity)
    for step in range(steps):
        request = random_request(b, k, n, capacity, seed + step)
        hot = where = None
        if spare is not None:
            random, shape = np.random.default_rng(seed + step), (b, k, n + spare)
            # Other values than on the host reveal where a row comes from.
            hot = jnp.asarray(random.integers(100, 200, (*shape, w)).astype(dtype))
            entry = jnp.asarray(np.argsort(random.random(shape))[..., :n], jnp.int32)
            miss = jnp.asarray(random.random((b, k, n)) < (1, 0.5, 0, 0.5)[step % 4])
            where = Replacement(jnp.where(request.valid, entry, 0), request.valid & miss)
        fetch: Fetch = jnp.int32((seed + step) % LAYERS), request, hot, where
        yield move(transfer, host, fetch), fetched(stored, fetch), 0


def normal(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.normal(0, 2, shape)


def tied(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.integers(-2, 3, shape)


def selected(
    b: int,
    k: int,
    g: int,
    t: int,
    budget: float,
    alpha: float,
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] = normal,
    geometry: Slots = SLOTS,
    seed: int = 0,
) -> Iterator[Compared]:
    """Compare the selection of rows by random scores."""
    scores = jnp.asarray(draw(np.random.default_rng(seed), (b, k, g, t)), jnp.float32)
    share = budget_fraction(budget)
    size = max(1, t * share.numerator // share.denominator)
    positions = positions_of(b, t)
    operands = scores, positions, budget_rows(budget, positions)
    by_kernel = jax.jit(calls.select_rows, static_argnums=(3, 4, 5, 6))
    slots, count = map(np.asarray, by_kernel(*operands, size, alpha, *geometry[:2]))
    options = {"size": size, "alpha": alpha, "geometry": geometry}
    expected, rank = on_cpu(_selected_by_xla, *operands, **options)
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


def _selected_by_xla(
    scores: Array, positions: Array, most: Array, size: int, alpha: float, geometry: Slots
) -> tuple[Request, Array]:
    eligible = geometry.eligible(positions, scores.shape[3])
    chosen = select(scores, eligible, alpha, most, size)
    return chosen, group_rank(jnp.where(eligible[:, :, None], scores, -jnp.inf))


def replaced(
    wide: bool, b: int, k: int, n: int, h: int, t: int, slots: int, steps: int = 4, seed: int = 0
) -> Iterator[Compared]:
    """Compare the hot set's replacement and directory, carried over the steps."""
    hot = HotSet.empty(b, k, h, 8, t, jnp.float32)
    hot = hot._replace(place=hot.place.astype(jnp.int32))
    place = hot.place.astype(jnp.int32 if wide else jnp.int16)
    directory = tuple(jnp.copy(x) for x in (hot.slots, hot.used, place))
    by_kernel = jax.jit(calls.replace_entries, donate_argnums=(3, 4, 5))
    for step in range(steps):
        request = random_request(b, k, n, slots, seed + step)
        positions = step + 3 * jnp.arange(b, dtype=jnp.int32)
        hot, where = on_cpu(replacement, hot, request, positions)
        entry, miss, *directory = by_kernel(request.slots, request.count, positions, *directory)
        yield (Replacement(entry, miss), directory), (where, [hot.slots, hot.used, hot.place]), 0


def scored(
    b: int, k: int, g: int, r: int, t: int, wide: bool = False, seed: int = 0
) -> Iterator[Compared]:
    """Compare the scores of every slot by a random index."""
    query, entries = _index(b, k, g, r, t, wide, seed)
    scores = jax.jit(calls.index_scores)(query, entries)
    yield scores, on_cpu(_scores_by_xla, query, entries), 5e-4 if wide else 1e-4


def left(
    b: int,
    k: int,
    g: int,
    r: int,
    t: int,
    columns: Sequence[int] = (0, *calls.LEADING),
    geometry: Slots = SLOTS,
    wide: bool = False,
    seed: int = 0,
) -> Iterator[Compared]:
    """Compare the remaining scores, by block, after a request."""
    query, entries = _index(b, k, g, r, t, wide, seed)
    operands = query, entries, positions_of(b, t), *random_request(b, k, t // 10, t, seed)[:2]
    sizes = geometry.blocks(t), *geometry[:2]
    by_kernel = jax.jit(calls.index_rest, static_argnums=(5, 6, 7, 8))
    for c in columns:
        expected = on_cpu(_rest_by_xla, *operands, geometry=geometry, columns=c)
        yield by_kernel(*operands, *sizes, c), expected, 5e-4 if wide else 1e-4


def _scores_by_xla(query: Array, entries: Array) -> Array:
    return IndexFormat("int4", query.shape[3]).scores_of_codes(query, entries, None)


def _rest_by_xla(
    query: Array, entries: Array, positions: Array, *request: Any, geometry: Slots, columns: int
) -> Rest:
    """Return `log_rest`, also of terms so small that it drops them on a CPU."""
    t = entries.shape[3]
    host_only = geometry.eligible(positions, t) & ~Request(*request).mask(t)
    scores = jnp.where(host_only[:, :, None], _scores_by_xla(query, entries), -jnp.inf)
    by_block = scores.reshape(*scores.shape[:3], geometry.blocks(t), -1)
    rest = jax.nn.logsumexp(by_block, axis=-1)
    if not columns:
        return Rest(rest)
    weights = jax.nn.softmax(scores, axis=-1, where=host_only[:, :, None])
    return Rest(rest, IndexFormat("int4", query.shape[3]).sums(weights, entries, columns))


def _index(
    b: int, k: int, g: int, r: int, t: int, wide: bool, seed: int
) -> tuple[Float[Array, "b k g r"], UInt32[Array, "b k e t"]]:
    """Return a query and index entries; if `wide`, the sizes of keys differ by powers of ten."""
    random = np.random.default_rng(seed)
    query = jnp.asarray(random.normal(0, 1, (b, k, g, r)), jnp.float32)
    codes = random.integers(0, 2**32, (b, k, -(-r // CODES), t), np.uint32)
    size = 10.0 ** random.integers(-2, 2, (b, k, 1, t)) if wide else 1.0
    step, low = (
        (size * random.uniform(*limits, (b, k, 1, t))).astype(np.float32).view(np.uint32)
        for limits in ((0.1, 0.3), (-3, -1))
    )
    return query, jnp.asarray(np.concatenate([codes, step >> 16 << 16 | low >> 16], axis=2))


def attended(
    b: int, k: int, g: int, d: int, n: int, cap: float | None = None, seed: int = 0
) -> Iterator[Compared]:
    """Compare the attention to requested rows; the first request is empty, padding is NaN."""
    random, request = np.random.default_rng(seed), random_request(b, k, n, n, seed)
    request = request._replace(count=request.count.at[0, 0].set(0))
    q = jnp.asarray(random.normal(0, 1, (b, k, g, d)), jnp.float32)
    rows = jnp.asarray(random.normal(0, 1, (b, k, n, 2 * d)), jnp.bfloat16)
    padded = jnp.where(request.valid[..., None], rows, jnp.nan)
    computed = jax.jit(calls.attend_rows, static_argnums=3)(q, padded, request.count, cap)
    part = packed(rows.astype(jnp.float32), request.valid)
    yield computed, on_cpu(softmax_over, q, part, cap=cap), 1e-3


CASES: dict[str, tuple[Callable[[], Iterator[Compared]], ...]] = {
    "gather_rows": (
        partial(gathered, 1, 2, 50, 144, jnp.uint8),
        partial(gathered, 2, 4, 100, 64, jnp.bfloat16),
    ),
    "gather_rows_hot": (partial(gathered, 2, 4, 100, 64, jnp.bfloat16, spare=100),),
    "select_rows": (
        partial(selected, 3, 2, 1, 3000, 0.1, math.inf, tied),
        partial(selected, 3, 2, 4, 3000, 0.1, 4.0),
    ),
    "replace_entries_16": (partial(replaced, False, 2, 3, 150, 350, 1500, 600),),
    "replace_entries_32": (partial(replaced, True, 2, 3, 150, 350, 1500, 600),),
    "index_scores": (partial(scored, 2, 2, 7, 30, 640),),
    "index_rest": (partial(left, 2, 2, 7, 30, 640),),
    "attend_rows": (partial(attended, 2, 2, 7, 80, 600, 2.0), partial(attended, 2, 2, 4, 128, 600)),
}
"""Cases of each kernel of `launch.KERNELS`."""


def difference(compared: Iterable[Compared], closer: float | None = None) -> str | None:
    """Return a line that describes the first difference; None if all agree.

    `closer` is a tolerance relative to 1 + |expected|, which holds as well as the absolute ones.
    """
    for computed, expected, tolerance in compared:
        leaves = (map(np.asarray, jax.tree.leaves(tree)) for tree in (computed, expected))
        for x, y in zip(*leaves, strict=True):
            limit = np.minimum(tolerance, closer * (1 + np.abs(y))) if closer else tolerance
            close = np.isclose(x, y, rtol=0, atol=limit) if tolerance else x == y
            if not close.all():
                return f"{np.sum(~close)} of {close.size} numbers are not the reference's"
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

    return run_command(run, program=argv is None)


if __name__ == "__main__":
    sys.exit(main())
