"""Work on only the leading slots gives that on all slots; lists of marked slots."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from runtime import engine, numbers

from infinigen_jax.cache.layers import DenseLayer
from infinigen_jax.decode.layer_rows import DeviceRows
from infinigen_jax.decode.state import Carry, Counts
from infinigen_jax.decode.steps import steps
from infinigen_jax.models import blueprint
from infinigen_jax.ops import used_slots
from infinigen_jax.ops.compaction import compact, compact_by_row, pack_marks
from infinigen_jax.ops.span import Span
from infinigen_jax.ops.used_slots import over_used
from infinigen_jax.policies import InfiniGen
from infinigen_jax.policies.base import Lookup
from infinigen_jax.selection.select import Request

POLICY = InfiniGen(budget=0.3, window=4, sinks=2, alpha=1e4, tail_tokens=16)


@pytest.mark.parametrize(
    "capacity, exceeded, used, size",
    [
        (4000, 0, 9, 4000),
        (4096, 0, 1024, 1024),
        (4096, 1024, 1025, 4096),
        (20_000, 0, 1025, 4096),
        (20_000, 1024, 1025, 4096),
        (20_000, 0, 4097, 20_000),
    ],
)
def test_the_smallest_size_with_all_used_slots_is_computed(capacity, exceeded, used, size):
    compute = jax.jit(lambda used: over_used(jnp.int32, used, capacity, exceeded))
    assert int(compute(jnp.int32(used))) == size


def test_a_run_has_no_work_for_fewer_slots_than_its_prompts(monkeypatch):
    monkeypatch.setattr(used_slots, "UNIT", 64)
    made = engine("one", dataclasses.replace(POLICY, window=6))
    long = numbers(65)
    both = ([long], [long, numbers(64)])
    runs = [made.start(prompts, max_new_tokens=64, batch=1) for prompts in both]
    assert [run.exceeded for run in runs] == [64, 0]
    branches = []
    for run in runs:
        assert len(list(itertools.islice(run.tokens(ignore_eos=True), 14))) == 14
        cache, dispatcher = run.cache, run.dispatcher
        fused = steps(dispatcher.decoder).fused
        lowered = fused.lower(dispatcher.weights, *cache.parts(False), run.drawn)
        branches.append(lowered.as_text().count("stablehlo.case"))
    assert runs[0].new_tokens[0] == runs[1].new_tokens[0]
    assert branches[0] < branches[1]
    # The next turn uses the same programs.
    conversation = made.conversation(context=256)
    list(conversation.turn(long, 1))
    assert conversation.run is not None and conversation.run.exceeded == 0


def test_rows_are_chosen_and_attended_to_as_among_all_slots(monkeypatch):
    """By a selection with a tail, and in a layer on the device: 64 or all of 256 slots."""
    made, b, capacity = engine("one", POLICY), 2, 256
    decoder, policy, weights = made.decoder, made.decoder.policy, made.runtime.weights.policy[0]
    config = decoder.config
    layer = blueprint(config, jnp.float32).layer(made.runtime.weights.params["layers"][0])
    rng, shape = np.random.default_rng(0), (b, config.num_kv_heads, capacity, config.head_dim)
    keys, values = jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32)
    a = jnp.asarray(rng.normal(size=(b, config.hidden_size)), jnp.float32)
    nothing = Counts(*jnp.zeros((2, b), jnp.int32))

    def results(index: Any, at: jax.Array) -> tuple[Request, jax.Array]:
        size = policy.request_size(capacity)
        request = policy.select(Lookup(config, layer, weights, index, a, at, size, capacity))
        rows = DeviceRows(decoder, DenseLayer(keys, values), at)
        query = config.grouped(layer.query(a, at))
        return request, rows.attend(query, Carry(a, None, nothing))[0]

    write = jax.jit(policy.append)
    index = write(weights, policy.init(config, b, capacity), keys, Span.whole(b, capacity))
    among_all = jax.jit(lambda *x: results(*x))
    places = [jnp.asarray(at, jnp.int32) for at in ((5, 40), (63, 20), (3, 64), (200, 20))]
    expected = [among_all(index, at) for at in places]
    monkeypatch.setattr(used_slots, "UNIT", 64)
    among_used = jax.jit(lambda *x: results(*x))
    for at, (whole, output) in zip(places, expected, strict=True):
        request, attended = among_used(index, at)
        for found, wanted in zip(jax.tree.leaves(request), jax.tree.leaves(whole), strict=True):
            tolerance = 1e-5 if found.dtype == jnp.float32 else 0
            np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(attended, output, rtol=1e-5, atol=1e-5)
    assert 0 < request.count.min() and request.count.max() > 19  # 0.3 of 64: from all slots


compiled_compact = jax.jit(compact, static_argnames="size")


@partial(jax.jit, static_argnums=1)
def compiled_by_row(mask, size):
    words = pack_marks(mask.reshape(-1, mask.shape[-1]))
    return compact_by_row(words, size)


def check_compact(got, mask):
    got, mask = np.asarray(got).reshape(-1, got.shape[-1]), mask.reshape(-1, mask.shape[-1])
    for places, row in zip(got, mask, strict=True):
        marked = np.flatnonzero(row)[: len(places)]
        assert places.tolist() == [*marked, *[0] * (len(places) - len(marked))]


@given(st.sampled_from([31, 1100, 4100]), st.integers(0, 2**32 - 1))
@example(1100, 0)
def test_compact_lists_the_marked_positions(t, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((2, 2, t)) < rng.choice([0.0, 0.1, 0.9, 1.0], size=(2, 2, 1))
    got = compiled_compact(jnp.asarray(mask), size=t)
    check_compact(got, mask)
    # As where loops of unknown length cost more.
    check_compact(compiled_by_row(jnp.asarray(mask), t), mask)


@pytest.mark.parametrize(("t", "size"), [(40, 3), (900, 150), (900, 128)])
def test_compact_into_fewer_places_than_there_are_marks(t, size):
    mask = np.random.default_rng(size).random((2, 2, t)) < 0.9
    check_compact(compiled_compact(jnp.asarray(mask), size=size), mask)
    check_compact(compiled_by_row(jnp.asarray(mask), size), mask)
