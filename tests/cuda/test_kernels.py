"""The CUDA kernels, run on the CPU with cuda_emulation.h, by the cases of `check_kernels`."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import emulated_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated_gpu import case_name

from infinigen_jax import check_kernels as check
from infinigen_jax import cuda
from infinigen_jax.cache.host_array import default_mesh
from infinigen_jax.cache.hot_set import Replacement
from infinigen_jax.cache.layers import Slots
from infinigen_jax.check_kernels import attended, gathered, left, normal, replaced, scored, selected
from infinigen_jax.cuda import calls
from infinigen_jax.cuda.launch import KERNELS
from infinigen_jax.selection.select import Request
from infinigen_jax.speculation.index import IndexFormat
from infinigen_jax.transfer import Transfer

pytestmark = emulated_gpu.MARKS


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_gpu.install(monkeypatch)
    monkeypatch.setattr(cuda, "load", lambda: None)


def signs(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.choice([0.0, -0.0, 1e-30, -1e-30], shape)


def wide(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.normal(0, 1, shape) * 10.0 ** random.integers(-20, 2, shape)


def some(draw: Any, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.where(random.random(shape) < 0.3, -np.inf, draw(random, shape))


def gathers(*sizes: Any, **options: Any) -> list[partial]:
    """Return cases with and without a hot set, whose spare rows are `spare`."""
    spare = options.pop("spare")
    return [partial(gathered, *sizes, **options, spare=x) for x in (None, spare)]


FEW, MANY = (Transfer("cuda", blocks=x, threads=y) for x, y in ((1, 32), (3, 1024)))
DRAWS = (check.tied, signs, wide, partial(some, check.tied), partial(some, wide))
EDGES = [
    # One row of one vector; requests of all slots, and a hot set without spare rows; long rows.
    *gathers(1, 1, 1, 4, jnp.float32, capacity=1, transfer=FEW, spare=0),
    *gathers(3, 3, 40, 36, jnp.float32, capacity=40, transfer=MANY, spare=0),
    *gathers(2, 2, 33, 272, jnp.uint8, capacity=50, transfer=FEW, spare=30),
    # More slots, rows and entries than a block has threads; ties; several shares of rows.
    *check.CASES["select_rows"],
    *check.CASES["replace_entries_16"],
    *check.CASES["replace_entries_32"],
    *check.CASES["attend_rows"],
    # Scores that are not aligned, nor the first and last eligible ones; more heads than are read at
    # a time; budgets of all rows and of none.
    *(partial(selected, 2, 2, 1, 70, 0.2, 2.0, x, Slots(5, 9)) for x in (normal, *DRAWS)),
    *(partial(selected, 3, 2, 4, 3000, 0.1, 4.0, draw) for draw in DRAWS),
    partial(selected, 2, 2, 5, 33, 0.3, math.inf, partial(some, normal), Slots(0, 1)),
    partial(selected, 1, 1, 4, 33, 1.0, math.inf, partial(some, normal), Slots(0, 1)),
    partial(selected, 1, 1, 1, 5, 0.001, 2.0, normal, Slots(0, 1)),
    # As many entries as requested rows; a request of one row.
    partial(replaced, False, 2, 2, 7, 7, 30, 14, 8),
    partial(replaced, True, 1, 1, 1, 2, 2, 2, 8),
    # One head, as many as share a product, and more than twice as many; codes of less than a word,
    # of a part of a step of products, of all that are loaded together, and of twice as many;
    # entries that are not aligned.
    partial(scored, 2, 2, 1, 16, 128, wide=True),
    partial(scored, 1, 2, 4, 128, 320, wide=True),
    partial(scored, 1, 1, 9, 5, 70),
    partial(scored, 1, 1, 2, 256, 128),
    # The same; sinks of more than a tile, and none; an idle sequence; blocks of one to four tiles.
    partial(left, 2, 2, 1, 16, 128, (16,), Slots(5, 9, 32), wide=True),
    partial(left, 1, 2, 4, 128, 384, (16,), Slots(0, 1, 128), wide=True),
    partial(left, 3, 1, 9, 5, 128, (5,), Slots(1, 9, 128)),
    partial(left, 1, 1, 2, 256, 128, (0,), Slots(33, 32, 32)),
    # Lanes without columns, and with all; one head.
    partial(attended, 2, 2, 1, 64, 40),
    partial(attended, 2, 2, 3, 256, 70),
]
OTHERS = [x for x in itertools.chain.from_iterable(check.CASES.values()) if x not in EDGES]
SCHEDULES = [(32, 0), (96, 1), (256, 2)]
"""Threads of a block, at most, and the seed of their order and of the numbers."""
CLOSER = {selected: 3e-6, scored: 1e-5, left: 1e-5, attended: 2e-5}
"""Tolerances of exact arithmetic in float32, whose order alone differs from the reference's."""


@pytest.mark.parametrize("case", [*EDGES, *OTHERS], ids=case_name)
def test_results_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch, case: partial):
    if case in EDGES:  # a turn of a block is small, and a block has several
        monkeypatch.setattr(calls, "WARPS", 1)
        monkeypatch.setattr(calls, "BLOCKS", 3)
    closer = None if case.keywords.get("wide") else CLOSER.get(case.func)
    for threads, seed in SCHEDULES if case in EDGES else SCHEDULES[1:2]:
        monkeypatch.setattr(emulated_gpu, "most_threads", threads)
        monkeypatch.setattr(emulated_gpu, "order", seed)
        assert check.difference(case(seed=seed), closer) is None


@pytest.mark.parametrize("hot", [False, True])
def test_nothing_is_written_behind_gathered_rows(hot: bool):
    b, k, n = 2, 3, 5
    _, host = check.random_host(b, k, 8, jnp.float32)
    request = check.random_request(b, k, n, check.CAPACITY, 0)
    rows = jnp.zeros((b, k, n, 8), jnp.float32)
    where = Replacement(jnp.zeros((b, k, n), jnp.int32), request.valid)
    directory = (rows, where) if hot else (None, None)
    fetch = jax.jit(Transfer("cuda").fetch, static_argnames="mesh")
    got, _ = fetch(host, jnp.int32(1), request, *directory, mesh=default_mesh())
    padding = np.asarray(got).view(np.uint8)[~np.asarray(request.valid)]
    assert padding.size and (padding == emulated_gpu.UNDEFINED).all()


def first_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave one case of each kernel."""
    monkeypatch.setattr(check, "CASES", {name: cases[:1] for name, cases in check.CASES.items()})


def test_right_kernels_pass(monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any]):
    first_cases(monkeypatch)
    status, out, err = command(check.main)
    assert (status, err) == (0, "")
    assert out.splitlines() == [f"{kernel}: as the reference" for kernel in KERNELS]
    assert set(emulated_gpu.launched) == set(KERNELS)


def test_wrong_kernels_are_found(monkeypatch: pytest.MonkeyPatch, command: Callable[..., Any]):
    first_cases(monkeypatch)
    emulated_gpu.wrong.update(KERNELS)
    status, out, err = command(check.main)
    lines = out.splitlines()
    for kernel, line in zip(KERNELS, lines, strict=True):
        assert line.startswith(f"{kernel}: ") and "numbers are not the reference's" in line
    assert status == 1
    assert err == f"error: the CUDA kernels do not work here: {'; '.join(lines)}\n"


def test_nothing_is_tried_behind_an_error(command: Callable[..., Any]):
    emulated_gpu.failing.add("gather_rows")
    status, out, err = command(check.main)
    assert status == 1 and "gather_rows failed" in err
    assert len(out.splitlines()) == len(err.splitlines()) == 1 and out.startswith("gather_rows: ")


def test_through_xla(monkeypatch: pytest.MonkeyPatch):
    """Requests may have any order."""
    b, k, g, r, t, n, slots = 2, 2, 3, 24, 640, 100, Slots(4, 32, 64)
    random, index = np.random.default_rng(0), IndexFormat("int4", r)
    query = jnp.asarray(random.normal(0, 1, (b, k, g, r)).astype(np.float32))
    entries = index.encode(jnp.asarray(random.normal(0, 1, (b, k, r, t)).astype(np.float32)))
    requested = random.permuted(np.broadcast_to(np.arange(t, dtype=np.int32), (b, k, t)), axis=2)
    count = jnp.asarray(random.integers(0, n + 1, (b, k)), jnp.int32)
    wanted, positions = Request(jnp.asarray(requested[..., :n]), count), jnp.array([t - 1, 300])

    def results(query: Any, entries: Any) -> tuple:
        given = query, entries, wanted, positions, slots
        return index.scores(query, entries), *(index.log_rest(*given, n) for n in (0, 5))

    expected = jax.jit(results)(query, entries)
    monkeypatch.setattr(cuda, "in_use", lambda: True)
    result = jax.jit(lambda *x: results(*x))(query, entries)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), result, expected)
    assert emulated_gpu.launched == {"index_scores": 1, "index_rest": 2}


def test_each_device_scores_and_selects_its_own_part(monkeypatch: pytest.MonkeyPatch):
    """Kernels are called on shards, because XLA cannot divide them."""
    seen = {}

    def run(kernel: str, operands: tuple, outs: tuple, grid: tuple, integers: tuple) -> tuple:
        seen[kernel] = operands[0].shape
        return tuple(jnp.zeros(out.shape, out.dtype) for out in outs)

    monkeypatch.setattr(calls, "call", run)
    mesh = jax.sharding.AbstractMesh((1, 2), ("data", "model"))
    rows = jax.NamedSharding(mesh, jax.P("data", "model"))
    query = jax.ShapeDtypeStruct((3, 4, 2, 8), jnp.float32, sharding=rows)
    index = jax.ShapeDtypeStruct((3, 4, 2, 128), jnp.uint32, sharding=rows)
    batch = jax.NamedSharding(mesh, jax.P("data"))
    positions = jax.ShapeDtypeStruct((3,), jnp.int32, sharding=batch)

    @jax.jit
    def chosen(query: jax.Array, index: jax.Array, positions: jax.Array) -> Any:
        scores = calls.index_scores(query, index)
        return scores, calls.select_rows(scores, positions, positions, 16, 4.0, 4, 32)

    scores, (slots, count) = chosen.trace(query, index, positions).out_info
    assert seen == {"index_scores": (3, 2, 2, 8), "select_rows": (3, 2, 2, 128)}
    shapes = [x.shape for x in (scores, slots, count)]
    assert shapes == [(3, 4, 2, 128), (3, 4, 16), (3, 4)]
