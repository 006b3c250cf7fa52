"""The CUDA kernels on a real GPU: `python -m pytest -m gpu`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import SPARSE, random_model, tokens_of

from infinigen_jax import cuda
from infinigen_jax.cache import Slots
from infinigen_jax.cuda import calls
from infinigen_jax.engine import Engine
from infinigen_jax.index import IndexFormat
from infinigen_jax.memory import allocate_host, default_mesh, write_span
from infinigen_jax.reuse import HotSet, Plan, plan
from infinigen_jax.selection import Request, budget_fraction, budget_rows, group_rank, select
from infinigen_jax.span import Span
from infinigen_jax.transfer.cuda import CudaTransfer
from infinigen_jax.transfer.xla import XlaTransfer

pytestmark = pytest.mark.gpu

LAYERS, CAPACITY = 3, 2000
SHAPES = [
    pytest.param(1, 8, 100, 256, jnp.bfloat16, id="bfloat16, head size 128"),
    pytest.param(3, 4, 77, 16, jnp.float32, id="float32, head size 8"),
    pytest.param(2, 5, 33, 80, jnp.float16, id="float16, head size 40"),
    pytest.param(2, 8, 333, 272, jnp.uint8, id="int8"),
    pytest.param(1, 2, 50, 144, jnp.uint8, id="int4"),
]


@pytest.fixture(autouse=True)
def usable() -> None:
    assert cuda.unavailable() is None


def host_cache(b: int, k: int, w: int, dtype: Any) -> jax.Array:
    """Random bits of the dtype's size, layer by layer."""
    random = np.random.default_rng(0)
    cache = allocate_host((LAYERS, b, k, CAPACITY, w), dtype, default_mesh())
    whole = Span.whole(b, CAPACITY)
    write = jax.jit(
        lambda cache, i, rows: write_span(cache, i, rows, whole, default_mesh()), donate_argnums=0
    )
    for layer in range(LAYERS):
        rows = random.integers(0, 100, (b, k, CAPACITY, w)).astype(dtype)
        cache = write(cache, jnp.int32(layer), jnp.asarray(rows))
    return cache


def request(b: int, k: int, n: int, slots: int, seed: int) -> Request:
    random = np.random.default_rng(seed)
    count = random.integers(0, n + 1, (b, k)).astype(np.int32)
    chosen = np.zeros((b, k, n), np.int32)
    for i in np.ndindex(b, k):
        chosen[i][: count[i]] = np.sort(random.permutation(slots)[: count[i]])
    return Request(jnp.asarray(chosen), jnp.asarray(count))


def on_cpu(function: Any, *arguments: Any) -> Any:
    """The reference: computed by the CPU, whose order of equal entries is the kernels'."""
    device = jax.devices("cpu")[0]
    moved = jax.device_put(arguments, device)
    with jax.default_device(device):
        return jax.tree.map(np.asarray, jax.jit(function)(*moved))


def move(transfer: Any, host: Any, layer: Any, wanted: Request, hot: Any, planned: Any, x: Any):
    """Rows with zeros as padding, and hot rows, beside a chain of products."""
    ticket = transfer.start(host, layer, wanted, hot, planned, default_mesh())
    ticket, x = transfer.behind(ticket, x)
    for _ in range(8):
        x = x @ x
    x, rows, hot = transfer.wait(ticket, x)
    return x, jnp.where(wanted.valid[..., None], rows, 0), hot


run = jax.jit(move, static_argnums=0)
WORK = jnp.eye(2048) if jax.default_backend() == "gpu" else jnp.eye(2)


@pytest.mark.parametrize("b, k, n, w, dtype", SHAPES)
def test_rows_are_those_of_the_reference(b, k, n, w, dtype):
    host = host_cache(b, k, w, dtype)
    for seed in range(20):
        arguments = host, jnp.int32(seed % LAYERS), request(b, k, n, CAPACITY, seed)
        _, expected, _ = run(XlaTransfer(), *arguments, None, None, WORK)
        x, rows, _ = run(CudaTransfer(), *arguments, None, None, WORK)
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(x, WORK)


@pytest.mark.parametrize("blocks, threads", [(1, 32), (3, 96), (132, 1024)])
def test_any_grid_moves_the_same(blocks: int, threads: int):
    host = host_cache(2, 3, 24, jnp.float32)
    arguments = host, jnp.int32(1), request(2, 3, 70, CAPACITY, 0), None, None, WORK
    _, expected, _ = run(XlaTransfer(), *arguments)
    _, rows, _ = run(CudaTransfer(blocks, threads), *arguments)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("b, k, n, w, dtype", SHAPES)
def test_the_hot_set_is_that_of_the_reference(b, k, n, w, dtype):
    host = host_cache(b, k, w, dtype)
    hot = HotSet.empty(b, k, 2 * n, w, CAPACITY, dtype)
    other_rows = jnp.copy(hot.rows)
    planned = jax.jit(plan)
    for position in range(8):
        wanted = request(b, k, n, 4 * n, position)
        hot, where = planned(hot, wanted, jnp.full(b, position, jnp.int32))
        arguments = host, jnp.int32(1), wanted
        _, expected, hot_rows = run(XlaTransfer(), *arguments, hot.rows, where, WORK)
        _, rows, other_rows = run(CudaTransfer(), *arguments, other_rows, where, WORK)
        np.testing.assert_array_equal(rows, expected)
        np.testing.assert_array_equal(other_rows, hot_rows)
        hot = hot._replace(rows=hot_rows)


@pytest.mark.parametrize("alpha", [4.0, math.inf])
@pytest.mark.parametrize("b, k, g, t, budget", [(1, 8, 1, 5000, 0.05), (3, 2, 4, 33000, 0.1)])
@pytest.mark.parametrize("kind", ["normal", "tied"])
def test_selection(b: int, k: int, g: int, t: int, budget: float, alpha: float, kind: str):
    random = np.random.default_rng(0)
    draw = (
        random.normal(0, 2, (b, k, g, t))
        if kind == "normal"
        else random.integers(0, 3, (b, k, g, t))
    )
    scores = jnp.asarray(draw, jnp.float32)
    positions = jnp.asarray(random.integers(t // 2, t, b), jnp.int32)
    share = budget_fraction(budget)
    size = t * share.numerator // share.denominator
    slots, count = jax.jit(
        lambda scores, positions: calls.select_rows(
            scores, positions, size, alpha, (share.numerator, share.denominator), 4, 32
        )
    )(scores, positions)

    def reference(scores: Any, positions: Any) -> Any:
        eligible = Slots(4, 32).eligible(positions, t)
        chosen = select(scores, eligible, alpha, budget_rows(budget, positions), size)
        return chosen, group_rank(jnp.where(eligible[:, None, None], scores, -jnp.inf))

    expected, rank = on_cpu(reference, scores, positions)
    slots, count = np.asarray(slots), np.asarray(count)
    np.testing.assert_array_equal(count, expected.count)
    if g == 1:
        np.testing.assert_array_equal(slots, expected.slots)
    for i in np.ndindex(b, k):
        # The last bits of a rank depend on the order of summation.
        own, other = (np.sort(rank[i][x[i][: count[i]]]) for x in (slots, expected.slots))
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)
        assert np.all(np.diff(slots[i][: count[i]]) > 0) and not slots[i][count[i] :].any()


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize("b, k, g, r, t", [(2, 8, 4, 128, 8192), (1, 2, 7, 30, 1152)])
def test_scores(monkeypatch: pytest.MonkeyPatch, name: str, b: int, k: int, g: int, r: int, t: int):
    random, slots = np.random.default_rng(0), Slots(4, 32, 64)
    index = IndexFormat(name, r)
    query = jnp.asarray(random.normal(0, 1, (b, k, g, r)), jnp.float32)
    keys = jnp.asarray(random.normal(0, 1, (b, k, r, t)), jnp.float32)
    wanted, positions = request(b, k, t // 10, t, 0), jnp.asarray([t - 1, t // 3][:b], jnp.int32)
    entries = jax.jit(index.encode)(keys)

    def both(query: Any, entries: Any) -> Any:
        rest = index.log_rest(query, entries, wanted, positions, slots)
        return index.scores(query, entries), rest

    own = jax.jit(both)(query, entries)
    monkeypatch.setattr(cuda, "in_use", lambda: False)
    expected = jax.jit(lambda *x: both(*x))(query, entries)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), own, expected)


@pytest.mark.parametrize("wide", [False, True])
def test_planning(wide: bool):
    b, k, n, h, t = 2, 8, 300, 700, 3000
    hot = HotSet.empty(b, k, h, 8, t, jnp.float32)
    if wide:
        hot = hot._replace(place=hot.place.astype(jnp.int32))
    own = tuple(jnp.copy(x) for x in (hot.slots, hot.used, hot.place))
    planned = jax.jit(calls.plan_reuse, donate_argnums=(3, 4, 5))
    for position in range(8):
        wanted = request(b, k, n, 1200, position)
        positions = jnp.full(b, position, jnp.int32)
        hot, expected = on_cpu(plan, hot, wanted, positions)
        entry, miss, *own = planned(wanted.slots, wanted.count, positions, *own)
        jax.tree.map(np.testing.assert_array_equal, Plan(entry, miss), expected)
        jax.tree.map(np.testing.assert_array_equal, tuple(own), (hot.slots, hot.used, hot.place))


@pytest.mark.parametrize("schedule", ["fused", "layerwise"])
@pytest.mark.parametrize("hot_set", [0.0, 1.5])
def test_generated_tokens_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, schedule: str, hot_set: float
):
    settings: dict[str, Any] = {"policy": SPARSE, "schedule": schedule, "hot_set": hot_set}
    tokens = []
    for transfer in (XlaTransfer(), CudaTransfer()):
        monkeypatch.setattr("infinigen_jax.engine.make_transfer", lambda name, t=transfer: t)
        tokens.append(tokens_of(Engine(random_model("gqa"), **settings)))
    assert tokens[0] == tokens[1]
