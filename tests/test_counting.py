"""Counts beyond a threshold, and the tail: against NumPy, and what must hold for any scores."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime import (
    ALL,
    NEW,
    RAGGED,
    SPARSE,
    counts_of,
    engine,
    finished,
    first_layers,
    random_model,
)

from infinigen_jax.attention import Tail, attend, attend_weighted, packed
from infinigen_jax.cache import Resident, Slots
from infinigen_jax.checkpoint import Model
from infinigen_jax.counting import POOL, holding, log_rest, narrow, pooled
from infinigen_jax.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.policies import Full, InfiniGen
from infinigen_jax.policies.base import Policy
from infinigen_jax.selection import Request, select
from infinigen_jax.span import Span

seeds = st.integers(0, 2**32 - 1)
RULES = ["fixed", "pooled", "top-p"]


def ranks(seed: int, b: int = 2, k: int = 3, n: int = 12) -> np.ndarray:
    """Log-probabilities with ties, some of them padding."""
    rng = np.random.default_rng(seed)
    x = np.round(rng.normal(size=(b, k, n)) * 3) / 2
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    x[rng.random(x.shape) < 0.2] = -np.inf
    return x.astype(np.float32)


@given(seeds, st.integers(0, 40))
def test_a_pool_has_the_best_of_all_heads(seed, total):
    rank = ranks(seed)
    keep = np.asarray(jax.jit(pooled)(jnp.asarray(rank), jnp.full((2,), total, jnp.int32)))
    for row, kept in zip(rank, keep, strict=True):
        finite = np.sort(row[np.isfinite(row)])[::-1]
        assert not kept[~np.isfinite(row)].any()
        np.testing.assert_array_equal(np.sort(row[kept])[::-1], finite[:total])


@given(seeds, st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.95, 1.0]))  # compiled for each
def test_top_p_holds_the_mass_with_the_fewest(seed, mass):
    rank = ranks(seed)
    keep = np.asarray(jax.jit(holding, static_argnums=1)(jnp.asarray(rank), mass))
    for j in np.ndindex(2, 3):
        p, kept = np.exp(rank[j].astype(np.float64)), keep[j]
        assert not kept[rank[j] == -np.inf].any()
        if p.sum() < mass + 1e-5:
            continue  # all of them, or at the mercy of rounding
        assert p[kept].sum() >= mass - 1e-5
        least = p[kept].min()
        np.testing.assert_array_equal(kept, p >= least - 1e-7)
        assert p[kept & (p > least + 1e-7)].sum() < mass + 1e-5


def test_top_p_takes_all_where_they_hold_less():
    rank = jnp.log(jnp.asarray([[[0.3, 0.2, 0.0]]], jnp.float32))
    assert holding(rank, 0.9).tolist() == [[[True, True, False]]]
    assert holding(jnp.full((1, 1, 2), -jnp.inf), 0.9).tolist() == [[[False, False]]]


def test_narrowing_keeps_the_order():
    slots = jnp.asarray([[[7, 3, 9, 5]]], jnp.int32)
    kept, count = narrow(slots, jnp.asarray([[[True, False, True, False]]]))
    assert kept.tolist() == [[[7, 9, 0, 0]]] and count.tolist() == [[2]]


def selected(count: str, budget: float = 0.2, **settings):
    """Requests of a policy for random scores, g = 2, with NumPy's group probabilities."""
    policy = InfiniGen(budget=budget, window=4, sinks=2, count=count, **settings)
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(2, 3, 2, 128)).astype(np.float32) * np.array([1, 2, 4])[:, None, None]
    scores = scores.astype(np.float32)
    positions = np.array([100, 57])
    at = jnp.asarray(positions, jnp.int32)
    request = jax.jit(policy._count, static_argnums=3)(jnp.asarray(scores), at, None, False)
    probability = np.zeros((2, 3, 128))
    for i in range(2):
        seen = slice(2, positions[i] - 3)
        e = np.exp(scores[i, :, :, seen].astype(np.float64))
        probability[i, :, seen] = (e / e.sum(axis=-1, keepdims=True)).sum(axis=1) / 2
    slots, counts = np.asarray(request.slots), np.asarray(request.count)
    chosen = [[set(slots[i, j, : counts[i, j]].tolist()) for j in range(3)] for i in range(2)]
    for i, j in np.ndindex(2, 3):
        assert len(chosen[i][j]) == counts[i, j]
    assert request.slots.shape[2] == policy.request_size(128)
    return chosen, probability, (0.2 * positions).astype(int)


def test_fixed_is_the_budget_for_each_head():
    chosen, probability, budget = selected("fixed", alpha=0.0)
    for i, j in np.ndindex(2, 3):
        best = np.argsort(-probability[i, j])[: budget[i]]
        assert chosen[i][j] == set(best.tolist())


def test_pooled_is_the_budget_for_the_layer():
    chosen, probability, budget = selected("pooled", alpha=0.0)
    for i in range(2):
        pairs = [
            (-probability[i, j, slot], j, slot)
            for j in range(3)
            for slot in np.argsort(-probability[i, j])[: POOL * budget[i]]
        ]
        best = sorted(pairs)[: 3 * budget[i]]
        assert [{int(s) for _, h, s in best if h == j} for j in range(3)] == chosen[i]
        assert len({len(c) for c in chosen[i]}) > 1


def test_top_p_stops_at_its_mass_or_the_budget():
    chosen, probability, budget = selected("top-p", alpha=0.0, mass=0.5)
    counts = set()
    for i, j in np.ndindex(2, 3):
        order = np.argsort(-probability[i, j])
        needed = int(np.searchsorted(np.cumsum(probability[i, j][order]), 0.5)) + 1
        assert chosen[i][j] == set(order[: min(needed, budget[i])].tolist())
        counts.add(len(chosen[i][j]))
    assert len(counts) > 2


@pytest.mark.parametrize(
    "count", ["pooled", *(pytest.param(r, marks=pytest.mark.slow) for r in ("fixed", "top-p"))]
)
def test_everything_fetched_is_the_full_cache(count):
    policy = dataclasses.replace(ALL, count=count, mass=1.0)
    run = finished(engine("gqa", policy))
    assert run.new_tokens == finished(engine("gqa", Full())).new_tokens


@pytest.mark.slow
@pytest.mark.parametrize(("count", "tail"), [("pooled", True), ("top-p", False)])
def test_schedules_batches_and_hot_sets_change_nothing(count, tail):
    policy = dataclasses.replace(SPARSE, count=count, mass=0.5, tail=tail)
    run = finished(engine("gqa", policy, 1))
    assert run.stats().compilations_after_warmup == 0
    layerwise = finished(engine("gqa", policy, 1, "layerwise"))
    hot = finished(engine("gqa", policy, 1, hot_set=2.0))
    assert run.new_tokens == layerwise.new_tokens == hot.new_tokens
    np.testing.assert_array_equal(counts_of(run), counts_of(layerwise))
    alone = finished(engine("gqa", policy, 1), RAGGED[2:])
    assert alone.new_tokens == run.new_tokens[2:]
    tokens = run.prompt_lengths + np.arange(NEW - 1)[:, None]
    heads = run.decoder.host_layers * 2
    assert (counts_of(run) <= heads * (0.2 * tokens)).all()


# The tail.


@pytest.mark.parametrize("blocks", [1, 4])
def test_the_rest_is_what_was_not_chosen(blocks):
    rng = np.random.default_rng(0)
    scores = (50 * rng.normal(size=(2, 2, 3, 16))).astype(np.float32)  # overflows without a peak
    eligible = np.arange(16)[None] < np.array([[12], [3]])
    slots = jnp.asarray([[[3, 5, 0], [1, 0, 0]], [[0, 1, 2], [2, 0, 0]]], jnp.int32)
    count = jnp.asarray([[2, 1], [3, 0]], jnp.int32)
    request, size = Request(slots, count), 16 // blocks
    got = np.asarray(
        log_rest(jnp.asarray(scores), jnp.asarray(eligible)[:, None], request, blocks).score
    )
    for i, j, m in np.ndindex(2, 2, blocks):
        chosen = np.asarray(slots)[i, j, : int(count[i, j])]
        block = range(m * size, (m + 1) * size)
        left = [t for t in block if eligible[i, t] and t not in chosen]
        if not left:
            assert (got[i, j, :, m] == -np.inf).all()
            continue
        s = scores[i, j][:, left].astype(np.float64)
        expected = s.max(axis=-1) + np.log(np.exp(s - s.max(axis=-1, keepdims=True)).sum(axis=-1))
        np.testing.assert_allclose(got[i, j, :, m], expected, rtol=1e-6)
    assert not np.isfinite(got[1, 0]).any()


def attention_inputs(seed: int = 0, n: int = 9):
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(2, 3, 2, 4)), jnp.float32)
    rows = jnp.asarray(rng.normal(size=(2, 3, n, 8)), jnp.float32)
    return q, rows


def test_a_tail_is_the_attention_that_equal_values_and_true_scores_would_give():
    q, rows = attention_inputs()
    left = jnp.arange(9) >= 5
    same = jnp.where(left[:, None], rows[:, :, 5:6], rows)  # keys and values equal in the rest
    scores = jnp.einsum("bkgd,bknd->bkgn", q, same[..., :4])
    values = jnp.stack([same[:, :, 5, 4:]] * 2, axis=2)
    apart = [jax.nn.logsumexp(scores[..., a:b], axis=-1) for a, b in ((5, 6), (6, 9))]
    counts = jnp.asarray([[[1, 3]]], jnp.int32)
    tail = Tail(jnp.stack(apart, axis=-1), values * counts[..., None].astype(jnp.float32), counts)
    part = packed(same, jnp.broadcast_to(~left, (2, 1, 9)))
    whole = packed(same, jnp.ones((2, 1, 9), bool))
    got, (weights,) = attend_weighted(q, part, tail=tail)
    expected, (all_weights,) = attend_weighted(q, whole)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(weights[..., :5], all_weights[..., :5], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("score", [-np.inf, -1e30])
def test_no_tail_changes_no_bit(score):
    q, rows = attention_inputs()
    part = packed(rows, jnp.ones((2, 1, 9), bool))
    scores = jnp.full((2, 3, 2, 5), score, jnp.float32)
    tail = Tail(scores, jnp.ones((2, 3, 5, 4), jnp.float32), jnp.ones((2, 1, 5), jnp.int32))
    np.testing.assert_array_equal(attend_weighted(q, part, tail=tail)[0], attend(q, part))


@pytest.mark.parametrize("block", [0, 4])
def test_the_sum_of_values_is_that_of_what_only_the_host_has(block):
    slots = Slots(2, 4, block)
    blocks = slots.blocks(20)
    assert blocks == (5 if block else 1)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2, 3, 20, 8)).astype(np.float32)
    lengths = np.array([9, 3])
    resident = Resident.empty(2, 3, 8, slots, jnp.float32, blocks).extend(
        jnp.asarray(rows[:, :, :12]), Span.first(jnp.asarray(lengths, jnp.int32)), slots
    )
    for step in range(8):
        for i in range(2):
            last = lengths[i] + step - 1
            gone = np.arange(2, max(2, last - 4 + 1))
            expected = np.stack(
                [
                    rows[i][:, gone[gone // (block or 20) == m], 4:].sum(axis=1)
                    for m in range(blocks)
                ],
                axis=1,
            )
            assert resident.left is not None
            np.testing.assert_allclose(resident.left[i], expected, rtol=1e-5, atol=1e-5)
        position = jnp.asarray(lengths + step, jnp.int32)
        new = np.stack([rows[i, :, lengths[i] + step] for i in range(2)])
        resident = resident.write(jnp.asarray(new), position, slots)


@pytest.mark.parametrize(
    ("name", "rows"), [("gqa", "int8"), pytest.param("opt", "auto", marks=pytest.mark.slow)]
)
def test_a_tail_is_nothing_when_everything_is_fetched(name, rows):
    with_tail = dataclasses.replace(ALL, tail=True)
    settings = {} if rows == "auto" else {"rows": rows}
    got = finished(engine(name, with_tail, **settings))
    assert got.new_tokens == finished(engine(name, ALL, **settings)).new_tokens


def scores_of(model: Model, policy: Policy, context: int = 40) -> np.ndarray:
    """Natural log-probabilities of given tokens, decoded with all layers on the host."""
    tokens = np.random.default_rng(2).integers(3, 96, (2, context + 20)).astype(np.int32)
    run = Engine(model, policy=policy, dense_layers=0).start(tokens[:, :context].tolist(), 20)
    steps = range(context, context + 19)
    return np.stack([np.asarray(run.score(tokens[:, i], tokens[:, i + 1])) for i in steps])


TAILED = InfiniGen(
    budget=0.1,
    window=4,
    sinks=2,
    partial_ratio=1.0,
    index_dtype="float32",
    count="fixed",
    query="plain",
    tail=True,
)
ONE_MEAN = dataclasses.replace(TAILED, tail_tokens=0)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("gqa", 0), ("opt", 8)] + [pytest.param("gqa", n, marks=pytest.mark.slow) for n in (8, 64)],
)
def test_a_tail_brings_the_scores_nearer_to_the_full_cache(name, tokens):
    """Of the first layer alone: on the host, it is speculated from its own input, so exactly."""
    model = first_layers(name)
    full = scores_of(model, Full())
    without = scores_of(model, dataclasses.replace(TAILED, tail=False))
    with_tail = scores_of(model, dataclasses.replace(TAILED, tail_tokens=tokens))
    assert np.abs(with_tail - full).mean() < 0.9 * np.abs(without - full).mean()


@pytest.mark.parametrize(
    ("name", "count"), [("gqa", "head"), pytest.param("opt", "fixed", marks=pytest.mark.slow)]
)
def test_a_tail_of_single_tokens_is_the_full_cache(name, count):
    """The index has every key, and the sums every value: whatever is fetched, nothing is lost."""
    model = random_model(name)
    policy = dataclasses.replace(TAILED, tail_tokens=1, count=count, budget=0.05)
    np.testing.assert_allclose(
        scores_of(model, policy), scores_of(model, Full()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("TAILED", [TAILED, ONE_MEAN])
def test_the_mean_key_does_not_enter_a_tail_twice(TAILED):
    """Scores of centred keys, and the constant added at the end, are the scores as they were."""
    config = random_model("gqa").config
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    mean = np.random.default_rng(4).normal(size=shape).astype(np.float32)
    found = [scores_of(first_layers("gqa", key_mean=x), TAILED) for x in (None, mean)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_settings_out_of_range_are_named():
    for mass in (0.0, 1.1, math.nan):
        with pytest.raises(InputError, match="--mass"):
            InfiniGen(mass=mass)
    with pytest.raises(InputError, match="--count median: use head or fixed or pooled"):
        InfiniGen(count="median")


@pytest.mark.parametrize("blocks", [1, 8])
def test_the_rest_by_slots_by_marks_and_of_masked_scores(blocks):
    rng = np.random.default_rng(7)
    scores = jnp.asarray(rng.normal(size=(2, 3, 2, 128)), jnp.float32)
    eligible = jnp.asarray(rng.random((2, 1, 128)) < 0.8)
    request = select(scores, eligible, 2.0, jnp.array([20, 20], jnp.int32), 20)
    rest = jax.jit(log_rest, static_argnames="blocks")
    masked = jnp.where(eligible[:, :, None], scores, -jnp.inf)
    listed = request._replace(chosen=None, marks=None)
    expected = rest(scores, eligible, listed, blocks=blocks)
    for known in (request, request._replace(chosen=None), listed):
        for one in (
            rest(scores, eligible, known, blocks=blocks),
            rest(masked, None, known, blocks=blocks),
        ):
            np.testing.assert_allclose(one.score, expected.score, rtol=1e-6, atol=1e-6)
