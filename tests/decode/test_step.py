"""Transfers, allocations and compiled programs of a step; attention in place."""

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime import ALL, NEW, RAGGED, SPARSE, copies, engine, finished, slow

from infinigen_jax import Engine, Full, Run
from infinigen_jax.cuda.launch import CONCURRENT
from infinigen_jax.decode import compiler_options as compiler
from infinigen_jax.decode.compiler_options import (
    COPIES_IN_FLIGHT,
    LIBRARY,
    PRODUCTS,
    WIDE,
    WIDTH,
    layer_options,
    step_options,
)
from infinigen_jax.decode.layer_rows import attend_requested
from infinigen_jax.decode.steps import groups_of, host_numbers, step, steps
from infinigen_jax.ops.attention import attend, finish_softmax, packed
from infinigen_jax.ops.compaction import pack_marks
from infinigen_jax.policies import H2O, InfiniGen, Policy
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer import Transfer

HOT = "hot"  # SPARSE with a hot set


def made(policy: Policy | str, schedule: str = "fused") -> Engine:
    if isinstance(policy, str):
        return engine("one", SPARSE, schedule=schedule, hot_set=1.5)
    return engine("gqa", policy, 1, schedule)


def test_bytes_and_fractions():
    run = finished(engine("one", SPARSE, 0))
    stats = run.stats()
    assert 0 < stats.fetched_fraction <= SPARSE.budget
    layers, heads, d, capacity = 1, 2, 8, run.capacity
    assert capacity == 128
    row = 2 * d * 4
    assert stats.host_cache_bytes == layers * 3 * heads * capacity * row
    assert run.cache.host is not None and run.cache.host.nbytes == stats.host_cache_bytes
    moved = sum(int(counts.moved.sum()) for counts in run.counts)
    assert 0 < moved <= (NEW - 1) * 3 * layers * heads * 25  # 25 = 0.2 * 128
    per_token = moved * row / (3 * (NEW - 1))
    assert stats.host_to_device_bytes_per_token == pytest.approx(per_token, abs=0)
    assert stats.device_index_bytes == sum(x.nbytes for x in jax.tree.leaves(run.cache.states))
    assert stats.device_index_bytes == layers * 3 * heads * capacity * 4 * 4  # half the columns
    assert (stats.prompt_tokens, stats.new_tokens) == (sum(map(len, RAGGED)), 3 * NEW)
    assert (stats.policy, stats.schedule, stats.transfer) == ("infinigen", "fused", "xla")
    assert run.plan.resident == sum(x.nbytes for x in jax.tree.leaves(run.cache.local))


@pytest.mark.parametrize(
    ("policy", "schedule"),
    [
        *((SPARSE, schedule) for schedule in ("fused", "layerwise")),
        *(slow(HOT, schedule) for schedule in ("fused", "layerwise")),
    ],
    ids=str,
)
def test_a_step_neither_reads_nor_sends_anything(policy, schedule, monkeypatch):
    run = made(policy, schedule).start(RAGGED, max_new_tokens=NEW)
    run.advance()

    def refuse(*arguments, **keywords):
        raise AssertionError("a step reads an array's value")

    # On the CPU the guard does not see reads, which are views there.
    array = type(run.drawn)
    for name in ("__array__", "__int__", "__float__", "__bool__", "__index__", "item", "tolist"):
        monkeypatch.setattr(array, name, refuse)
    monkeypatch.setattr(array, "block_until_ready", refuse)
    with jax.transfer_guard("disallow"):
        for _ in range(2 * SPARSE.window):
            run.advance()


def compiled_fused(run: Run) -> str:
    parts = run.cache.parts(run.decoder.policy.observes)
    lowered = steps(run.decoder).fused.lower(run.runtime.weights, *parts, run.drawn)
    return lowered.compile().as_text()


@pytest.mark.parametrize(
    "policy", [SPARSE, slow(HOT), slow(Full())], ids=["infinigen", "hot", "full"]
)
def test_the_fused_step_copies_neither_cache_nor_weights(policy):
    run = made(policy).start(RAGGED, max_new_tokens=NEW)
    largest = max(x.size for x in jax.tree.leaves(run.runtime.model.params["layers"][0]))
    if policy == HOT:  # these weights are smaller than one request
        assert run.cache.hot[0].entries is not None
        largest = run.cache.hot[0].entries.rows.size
    hlo = compiled_fused(run)
    assert max(copies(hlo), default=0) < min(run.cache.host[0].size, largest)
    assert "callback" not in hlo


def test_the_layerwise_step_and_the_flush_copy_no_cache():
    run = made(SPARSE, "layerwise").start(RAGGED, max_new_tokens=NEW)
    compiled, numbers = steps(run.decoder), host_numbers(run.decoder)
    cache, weights = run.cache, run.runtime.weights
    programs: list[str] = []

    def layers(*arguments: Any) -> Any:
        programs.append(compiled.pieces.layers.lower(*arguments).compile().as_text())
        return compiled.pieces.layers(*arguments)

    flush = (weights.policy[0], numbers[0], cache.host, cache.states[0], cache.local[1])
    lengths = cache.scales[0], cache.lengths
    programs.append(compiled.flush.lower(*flush, *lengths, streams=False).compile().as_text())
    pieces = compiled.pieces._replace(layers=layers)
    step(run.decoder, pieces, numbers, weights, *cache.parts(False), run.drawn)
    assert len(programs) == 1 + len(pieces.groups)
    for hlo in programs:
        assert max(copies(hlo), default=0) < cache.host[0].size


OWN, AHEAD = InfiniGen(query="own"), InfiniGen(query="plain")


@pytest.mark.parametrize(
    "policy, changes, sizes",
    [
        (OWN, {"dense_layers": 1}, [1, *[2] * 14, 1]),
        (AHEAD, {}, [1, 1, *[2] * 13, 1, 1]),  # the last layer requests no rows
        (H2O(), {}, [1] * 30),
        (OWN, {"weights_on_host": True}, [1] * 30),
    ],
)
def test_groups_of_thirty_layers(policy, changes, sizes):
    decoder = engine("gqa", policy).decoder
    config = dataclasses.replace(decoder.config, num_layers=30)
    decoder = dataclasses.replace(decoder, config=config, **{"dense_layers": 2} | changes)
    groups = groups_of(decoder)
    assert [len(group) for group in groups] == sizes
    assert [layer for group in groups for layer in group] == list(range(30))


B, K, G, D, T = 3, 4, 2, 8, 700
SIZE = 400  # places of a request: up to seven jobs of a head, the last one not whole


@jax.jit
def both(q, rows, request):
    def read(head, place, slots):
        return rows.reshape(B * K, T, 2 * D)[head[:, None], slots][None]

    listed, sums = attend_requested(q, request._replace(marks=None), read, sums=True)
    marks = request._replace(slots=jnp.full_like(request.slots, -1))
    by_marks, again = attend_requested(q, marks, read, sums=True)
    return (finish_softmax(listed, q), sums), (finish_softmax(by_marks, q), again), listed


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_slots_by_list_and_by_marks(seed):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((B, K, G, D)).astype(np.float32)
    rows = rng.standard_normal((B, K, T, 2 * D)).astype(np.float32)
    # About as many jobs as a loop takes: one loop, or two.
    count = rng.integers(1, SIZE + 1, (B, K)) * (rng.random((B, K)) < 0.8).astype(np.int32)
    mask = np.zeros((B, K, T), bool)
    slots = np.zeros((B, K, SIZE), np.int32)
    for i, j in np.ndindex(B, K):
        slots[i, j, : count[i, j]] = np.sort(rng.permutation(T)[: count[i, j]])
        mask[i, j, slots[i, j, : count[i, j]]] = True
    marks = pack_marks(jnp.asarray(mask))
    request = Request(jnp.asarray(slots), jnp.asarray(count), marks=marks)
    (listed, sums), (by_marks, again), softmax = both(jnp.asarray(q), jnp.asarray(rows), request)
    np.testing.assert_array_equal(listed, by_marks)
    np.testing.assert_array_equal(sums, again)
    expected = attend(jnp.asarray(q), packed(jnp.asarray(rows), jnp.asarray(mask)))
    some = count > 0
    np.testing.assert_allclose(listed[some], expected[some], rtol=1e-5, atol=1e-5)
    assert (np.asarray(softmax.total)[~some] == 0).all()
    np.testing.assert_allclose(sums, (rows[..., D:] * mask[..., None]).sum(2), rtol=1e-4, atol=1e-4)


LAYOUT: Any = SimpleNamespace(weights_on_host=False)
STREAMED: Any = SimpleNamespace(weights_on_host=True)


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "")


@pytest.mark.parametrize("flags", ["avx512f avx512_vbmi2", "avx512f", None])
def test_long_vectors_where_the_processor_has_them(monkeypatch, tmp_path, flags):
    file = tmp_path / "cpuinfo"
    if flags is not None:
        file.write_text(f"flags\t\t: fpu {flags} sse\n")
    monkeypatch.setattr(compiler, "CPU_INFO", file)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    options = layer_options(LAYOUT)
    assert options == PRODUCTS | (WIDE if flags and "vbmi2" in flags else {})
    assert jax.jit(lambda x: x + 1, compiler_options=options)(jnp.int32(1)) == 2


def test_the_environment_has_precedence(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{WIDTH}=256")
    assert layer_options(LAYOUT) == PRODUCTS
    monkeypatch.setenv("XLA_FLAGS", f"--{WIDTH}=256 --{LIBRARY}=")
    assert layer_options(LAYOUT) == {}


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr(compiler, "long_vectors", lambda: False)
    monkeypatch.setattr(compiler, "PRODUCTS", {})
    assert layer_options(STREAMED) == COPIES_IN_FLIGHT
    monkeypatch.setattr(compiler, "COPIES_IN_FLIGHT", {"xla_gpu_no_such_option": 1})
    with caplog.at_level(logging.WARNING):
        assert layer_options(STREAMED) == {}
    assert "no_such_option" in caplog.text


def test_kernels_run_concurrently_where_rows_are_fetched_by_one():
    made = engine("one", ALL).decoder
    by_kernel = dataclasses.replace(made, transfer=Transfer("cuda"))
    assert CONCURRENT.items() <= step_options(by_kernel).items()
    for other in (made, dataclasses.replace(by_kernel, policy=Full())):
        assert not CONCURRENT.keys() & step_options(other).keys()
