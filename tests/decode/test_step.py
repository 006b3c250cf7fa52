"""Transfers, allocations and compiled programs of a step."""

import dataclasses
from typing import Any

import jax
import pytest
from runtime import NEW, RAGGED, SPARSE, copies, engine, finished

from infinigen_jax.cache.hot_set import HotSet
from infinigen_jax.decode.steps import groups_of, host_numbers, step, steps
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.generation import Run
from infinigen_jax.policies import H2O, Full, InfiniGen, Policy

HOT = "hot"  # SPARSE with a hot set


def made(policy: Policy | str, schedule: str = "fused") -> Engine:
    if isinstance(policy, str):
        return engine("one", SPARSE, schedule=schedule, hot_set=1.5)
    return engine("gqa", policy, 1, schedule)


def test_bytes_and_fractions():
    full = finished(engine("one", Full(), 0)).stats()
    assert full.fetched_fraction == 1.0
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
    assert full.host_to_device_bytes_per_token == layers * heads * capacity * row
    assert stats.device_index_bytes == sum(x.nbytes for x in jax.tree.leaves(run.cache.states))
    assert stats.device_index_bytes == layers * 3 * heads * capacity * 4 * 4  # half the columns
    assert (stats.prompt_tokens, stats.new_tokens) == (sum(map(len, RAGGED)), 3 * NEW)
    assert (stats.policy, stats.schedule, stats.transfer) == ("infinigen", "fused", "xla")
    assert run.plan.resident == sum(x.nbytes for x in jax.tree.leaves(run.cache.local))


# Operations that a step must not do.


@pytest.mark.parametrize(
    ("policy", "schedule"),
    [
        (HOT, "fused"),
        (SPARSE, "layerwise"),
        pytest.param(HOT, "layerwise", marks=pytest.mark.slow),
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
    "policy",
    [
        pytest.param(SPARSE, id="infinigen"),
        pytest.param(HOT, id="hot", marks=pytest.mark.slow),
        pytest.param(Full(), id="full", marks=pytest.mark.slow),
    ],
)
def test_the_fused_step_copies_neither_cache_nor_weights(policy):
    run = made(policy).start(RAGGED, max_new_tokens=NEW)
    assert run.cache.host is not None
    largest = max(x.size for x in jax.tree.leaves(run.runtime.model.params["layers"][0]))
    if policy == HOT:  # these weights are smaller than one request
        assert isinstance(run.cache.hot[0], HotSet)
        largest = run.cache.hot[0].rows.size
    hlo = compiled_fused(run)
    assert max(copies(hlo), default=0) < min(run.cache.host[0].size, largest)
    assert "callback" not in hlo


def test_the_layerwise_step_and_the_flush_copy_no_cache():
    run = made(SPARSE, "layerwise").start(RAGGED, max_new_tokens=NEW)
    compiled, numbers = steps(run.decoder), host_numbers(run.decoder)
    cache, weights = run.cache, run.runtime.weights
    assert cache.host is not None
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
        (OWN, {}, [2, *[4] * 7]),
        (OWN, {"dense_layers": 0}, [3] * 10),
        (OWN, {"dense_layers": 1}, [1, *[4] * 5, *[3] * 3]),
        (AHEAD, {}, [1, 1, *[3] * 9, 1]),  # the last layer requests no rows
        (Full(), {}, [2, *[4] * 7]),
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
