"""The tail: against NumPy, and what must hold for any scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import ALL, TAILED, engine, finished, random_model, scores_of

from infinigen_jax.cache.layers import Resident, Slots
from infinigen_jax.ops.attention import Tail, attend_weighted, packed
from infinigen_jax.ops.span import Span
from infinigen_jax.policies import Full
from infinigen_jax.selection.rest import log_rest
from infinigen_jax.selection.select import Request, select

ONE_MEAN = dataclasses.replace(TAILED, tail_tokens=0)


@pytest.mark.parametrize("blocks", [1, 4])
def test_the_rest_is_what_was_not_chosen(blocks):
    rng = np.random.default_rng(0)
    scores = (50 * rng.normal(size=(2, 2, 3, 16))).astype(np.float32)  # overflows without a peak
    eligible = np.arange(16)[None] < np.array([[12], [3]])
    slots = jnp.asarray([[[3, 5, 0], [1, 0, 0]], [[0, 1, 2], [2, 0, 0]]], jnp.int32)
    count = jnp.asarray([[2, 1], [3, 0]], jnp.int32)
    request, size = Request(slots, count), 16 // blocks
    rest = jax.jit(log_rest, static_argnums=3)
    got = np.asarray(rest(scores, eligible[:, None], request, blocks).score)
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
    q = jnp.asarray(rng.normal(size=(2, 3, 2, 4)).astype(np.float32))
    rows = jnp.asarray(rng.normal(size=(2, 3, n, 8)).astype(np.float32))
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
    with_tail, without = attend_weighted(q, part, tail=tail), attend_weighted(q, part)
    np.testing.assert_array_equal(with_tail[0], without[0])


@pytest.mark.parametrize("block", [0, 4])
def test_the_sum_of_values_is_that_of_what_only_the_host_has(block):
    slots, write = Slots(2, 4, block), jax.jit(Resident.write, static_argnums=3)
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
        resident = write(resident, jnp.asarray(new), position, slots)


@pytest.mark.slow
def test_the_tail_is_empty_when_everything_is_fetched():
    with_tail = dataclasses.replace(ALL, tail=True)
    got, without = (finished(engine("one", policy, rows="int8")) for policy in (with_tail, ALL))
    assert got.new_tokens == without.new_tokens


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), [("one", 8), ("opt-one", 0)])
def test_a_tail_brings_the_scores_nearer_to_the_full_cache(name, tokens):
    """The first layer alone: on the host, its query is its own, so speculation is exact."""
    model = random_model(name)
    full = scores_of(model, Full())
    without = scores_of(model, dataclasses.replace(TAILED, tail=False))
    with_tail = scores_of(model, dataclasses.replace(TAILED, tail_tokens=tokens))
    assert np.abs(with_tail - full).mean() < 0.9 * np.abs(without - full).mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one", "opt"])
def test_a_tail_of_single_tokens_equals_the_full_cache(name):
    """The index has every key, and the sums every value, so nothing is lost."""
    model = random_model(name)
    policy = dataclasses.replace(TAILED, tail_tokens=1, alpha=4.0, budget=0.05)
    np.testing.assert_allclose(
        scores_of(model, policy), scores_of(model, Full()), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("query", [pytest.param("plain", marks=pytest.mark.slow), "own"])
def test_a_tail_of_single_tokens_is_the_full_cache_under_a_soft_cap(query):
    model = random_model("gemma2")
    config, rng = model.config, np.random.default_rng(4)
    mean = rng.normal(size=(1, config.num_kv_heads, config.head_dim)).astype(np.float32)
    model = dataclasses.replace(model, key_mean=mean)
    policy = dataclasses.replace(TAILED, tail_tokens=1, budget=0.05, query=query)
    full = scores_of(model, Full())
    np.testing.assert_allclose(scores_of(model, policy), full, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), [("one", TAILED), ("gemma2", ONE_MEAN)])
def test_the_mean_key_does_not_enter_a_tail_twice(name, policy):
    """Scores of centred keys, and the constant added at the end, are the scores as they were."""
    model = random_model(name)
    config = model.config
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    mean = np.random.default_rng(4).normal(size=shape).astype(np.float32)
    found = [scores_of(dataclasses.replace(model, key_mean=x), policy) for x in (None, mean)]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("blocks", [1, 8])
def test_the_rest_by_slots_by_marks_and_of_masked_scores(blocks):
    rng = np.random.default_rng(7)
    scores = jnp.asarray(rng.normal(size=(2, 3, 2, 128)).astype(np.float32))
    eligible = jnp.asarray(rng.random((2, 1, 128)) < 0.8)
    choose = jax.jit(select, static_argnames=("alpha", "size"))
    request = choose(scores, eligible, alpha=2.0, cap=jnp.array([20, 20], jnp.int32), size=20)
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
