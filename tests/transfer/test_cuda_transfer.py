"""The `cuda` transfer, and selection and reuse by kernels, on the CPU with emulated kernels."""

import math
from typing import Any

import emulated_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_emulation import compiler
from emulated_gpu import launched
from runtime import ALL, SPARSE, engine, random_model, scores_of, tokens_of

from infinigen_jax import cuda
from infinigen_jax.cache.host_array import allocate_host, default_mesh, write_span
from infinigen_jax.cache.hot_set import HotSet, Replacement, replacement
from infinigen_jax.cache.layers import Slots
from infinigen_jax.cuda import calls
from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.ops.span import Span
from infinigen_jax.selection.select import Request, budget_rows, select
from infinigen_jax.transfer import CudaTransfer, XlaTransfer, make_transfer

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="needs g++"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="stands in for a GPU on the CPU"),
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated_gpu.install(monkeypatch)


def host_cache(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    """A pinned cache of random bits that are no NaN."""
    random = np.random.default_rng(seed)
    values = random.integers(0, 100, shape).astype(dtype)
    cache = allocate_host(shape, dtype, default_mesh())
    whole = Span.whole(shape[1], shape[3])
    write = jax.jit(lambda cache, i, rows: write_span(cache, i, rows, whole, default_mesh()))
    for layer in range(shape[0]):
        cache = write(cache, jnp.int32(layer), jnp.asarray(values[layer]))
    return cache


def request(shape: tuple[int, int, int], slots: int, seed: int) -> Request:
    random = np.random.default_rng(seed)
    b, k, n = shape
    count = random.integers(0, n + 1, (b, k)).astype(np.int32)
    chosen = np.zeros(shape, np.int32)
    for i in np.ndindex(b, k):
        chosen[i][: count[i]] = np.sort(random.permutation(slots)[: count[i]])
    return Request(jnp.asarray(chosen), jnp.asarray(count))


def fetch(transfer: Any, host: Any, layer: Any, wanted: Request, hot: Any, replaced: Any):
    """Rows and hot rows; padding is made zeros."""
    rows, hot = transfer.fetch(host, layer, wanted, hot, replaced, default_mesh())
    return jnp.where(wanted.valid[..., None], rows, 0), hot


compiled_fetch = jax.jit(fetch, static_argnums=0)
reference = jax.jit(replacement)
SHAPES = [(2, 3, 5, 8, jnp.float32), (1, 2, 9, 16, jnp.bfloat16), (2, 2, 7, 80, jnp.uint8)]
"""b, k, n, row width, dtype."""


@pytest.mark.parametrize("b, k, n, w, dtype", SHAPES)
def test_rows_are_those_of_the_reference(b, k, n, w, dtype):
    host = host_cache((3, b, k, 40, w), dtype)
    for seed in range(5):
        arguments = host, jnp.int32(seed % 3), request((b, k, n), 40, seed), None, None
        expected, _ = compiled_fetch(XlaTransfer(), *arguments)
        rows, hot = compiled_fetch(CudaTransfer(), *arguments)
        np.testing.assert_array_equal(rows, expected)
        assert hot is None
    assert launched["gather_rows"] == 5


@pytest.mark.parametrize("b, k, n, w, dtype", SHAPES[:1])
def test_slots_that_sequences_share(b, k, n, w, dtype):
    """Two more rows of the array after the sequences' own: 40 slots that all share."""
    host = host_cache((3, b + 2, k, 20, w), dtype)
    for seed in range(5):
        layer = jnp.int32(seed % 3)
        wanted = request((b, k, n), 60, seed)
        expected, _ = compiled_fetch(XlaTransfer(), host, layer, wanted, None, None)
        rows, _ = compiled_fetch(CudaTransfer(), host, layer, wanted, None, None)
        np.testing.assert_array_equal(rows, expected)
        stored = np.asarray(host)[seed % 3].astype(np.float32)
        for i, head, j in np.ndindex(b, k, n):
            slot = int(wanted.slots[i, head, j])
            row = (
                stored[b + slot // 20, head, slot % 20] if slot < 40 else stored[i, head, slot - 40]
            )
            if j < int(wanted.count[i, head]):
                np.testing.assert_array_equal(np.float32(rows[i, head, j]), row)


@pytest.mark.parametrize("b, k, n, w, dtype", SHAPES[2:])
def test_the_hot_set_is_that_of_the_reference(b, k, n, w, dtype):
    host = host_cache((2, b, k, 30, w), dtype)
    empty = HotSet.empty(b, k, n + 3, w, 30, dtype)
    sets = {transfer: empty for transfer in (XlaTransfer(), CudaTransfer())}
    for position in range(6):
        wanted = request((b, k, n), 12, position)
        results = {}
        for transfer, hot in sets.items():
            hot, replaced = reference(hot, wanted, jnp.full(b, position, jnp.int32))
            rows, hot_rows = compiled_fetch(
                transfer, host, jnp.int32(1), wanted, hot.rows, replaced
            )
            sets[transfer] = hot._replace(rows=hot_rows)
            results[transfer] = rows
        np.testing.assert_array_equal(results[CudaTransfer()], results[XlaTransfer()])
        np.testing.assert_array_equal(sets[CudaTransfer()].rows, sets[XlaTransfer()].rows)


def test_rows_that_are_not_whole_vectors_are_refused():
    host, wanted = host_cache((1, 1, 1, 8, 6), jnp.float32), request((1, 1, 4), 8, 0)
    with pytest.raises(InputError, match="rows of 24 bytes"):
        compiled_fetch(CudaTransfer(), host, jnp.int32(0), wanted, None, None)


@pytest.mark.parametrize("alpha", [3.0, math.inf])
def test_selection_through_xla(alpha: float):
    selected = jax.jit(
        lambda scores, positions: calls.select_rows(
            scores, positions, budget_rows(0.3, positions), 27, alpha, 2, 4
        )
    )
    reference = jax.jit(
        lambda scores, positions: select(
            scores, Slots(2, 4).eligible(positions, 90), alpha, budget_rows(0.3, positions), 27
        )
    )
    for seed in range(5):
        random = np.random.default_rng(seed)
        scores = jnp.asarray(random.normal(0, 2, (2, 3, 1, 90)).astype(np.float32))
        positions = jnp.asarray(random.integers(0, 90, 2), jnp.int32)
        slots, count = selected(scores, positions)
        expected = reference(scores, positions)
        np.testing.assert_array_equal(count, expected.count)
        np.testing.assert_array_equal(slots, expected.slots)


def test_replacement_through_xla():
    hot = HotSet.empty(2, 2, 9, 4, 40, jnp.float32)
    replaced = jax.jit(calls.replace_entries, donate_argnums=(3, 4, 5))
    directory = [jnp.array(x) for x in (hot.slots, hot.used, hot.place)]
    for position in range(5):
        wanted = request((2, 2, 6), 14, position)
        positions = jnp.full(2, position, jnp.int32)
        hot, expected = reference(hot, wanted, positions)
        entry, miss, *directory = replaced(wanted.slots, wanted.count, positions, *directory)
        jax.tree.map(np.testing.assert_array_equal, Replacement(entry, miss), expected)
        jax.tree.map(
            np.testing.assert_array_equal, tuple(directory), (hot.slots, hot.used, hot.place)
        )


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "one", "hot_set": 1.5},
        pytest.param({"name": "gqa", "hot_set": 0.0}, marks=pytest.mark.slow),
        pytest.param(
            {"name": "gqa", "hot_set": 1.0, "schedule": "layerwise", "rows": "int8"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_generated_tokens_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
):
    expected = tokens_of(engine(**settings))
    monkeypatch.setattr("infinigen_jax.engine.runtime.make_transfer", lambda name: CudaTransfer())
    monkeypatch.setattr(cuda, "in_use", lambda: True)
    rest = {key: value for key, value in settings.items() if key != "name"}
    dense = 0 if settings["name"] == "one" else 1
    made = Engine(random_model(settings["name"]), policy=SPARSE, dense_layers=dense, **rest)
    launched.clear()
    assert tokens_of(made) == expected
    assert launched["gather_rows"] + launched["gather_rows_hot"] == launched["select_rows"] > 0
    assert launched["replace_entries_16"] == launched["gather_rows_hot"]
    assert bool(launched["gather_rows_hot"]) == bool(settings["hot_set"])


@pytest.mark.parametrize("name", ["one", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_a_kernel_attends_to_rows_in_bfloat16(monkeypatch: pytest.MonkeyPatch, name: str):
    model = random_model(name, "bfloat16")
    expected = scores_of(model, ALL)
    monkeypatch.setattr("infinigen_jax.engine.runtime.make_transfer", lambda name: CudaTransfer())
    monkeypatch.setattr(cuda, "in_use", lambda: True)
    launched.clear()
    # XLA rounds the weights of attention to bfloat16, by 2^-9 of their size.
    np.testing.assert_allclose(scores_of(model, ALL), expected, rtol=2**-9)
    assert launched["attend_rows"] == launched["select_rows"] > 0


def test_without_a_gpu_it_says_so_once(caplog: pytest.LogCaptureFixture):
    assert cuda.unavailable() == "JAX sees no NVIDIA GPU" and not cuda.in_use()
    for name in ("auto", "xla"):
        assert isinstance(make_transfer(name), XlaTransfer)
    assert not caplog.messages
    assert isinstance(make_transfer("cuda"), XlaTransfer)
    assert caplog.messages == ["transfer cuda: JAX sees no NVIDIA GPU; using xla instead"]


def test_on_a_gpu_it_is_the_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cuda, "unavailable", lambda: None)
    assert cuda.in_use()
    for name in ("auto", "cuda"):
        assert isinstance(make_transfer(name), CudaTransfer)
    assert isinstance(make_transfer("xla"), XlaTransfer)


def test_the_kernels_can_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INFINIGEN_JAX_KERNELS", "0")
    cuda.unavailable.cache_clear()
    assert cuda.unavailable() == "INFINIGEN_JAX_KERNELS is 0"
    cuda.unavailable.cache_clear()
