"""The tail: against NumPy, and properties for any scores."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import TAILED, full_scores, random_model, scores_of

from infinigen_jax.loading.load import Model
from infinigen_jax.ops.attention import Tail, attend_weighted, packed
from infinigen_jax.selection.rest import log_rest
from infinigen_jax.selection.select import select


@pytest.mark.parametrize("blocks", [1, 8])
def test_the_rest_is_what_was_not_chosen(blocks):
    """Some, all or no tokens are chosen; by marks, by slots, and with masked scores."""
    rng = np.random.default_rng(7)
    scores = rng.normal(100, 1, size=(3, 2, 2, 128)).astype(np.float32)  # overflow without a peak
    eligible = rng.random((3, 1, 128)) < np.array([0.8, 0.1, 0.8])[:, None, None]
    choose = jax.jit(select, static_argnames=("alpha", "size"))
    cap = jnp.array([20, 20, 0], jnp.int32)
    request = choose(scores, eligible, alpha=math.inf, cap=cap, size=20)
    assert request.chosen is not None
    left = np.where((eligible & ~np.asarray(request.chosen))[:, :, None], scores, -np.inf)
    left = left.reshape(3, 2, 2, blocks, -1).astype(np.float64)
    expected = np.logaddexp.reduce(left, axis=-1)
    assert np.isneginf(expected[1]).all() and np.isfinite(expected[::2]).all()
    rest = jax.jit(log_rest, static_argnames="blocks")
    by_marks = request._replace(chosen=None)
    masked = np.where(eligible[:, :, None], scores, -np.inf)
    for known in (request, by_marks, by_marks._replace(marks=None)):
        for given, mask in ((scores, eligible), (masked, None)):
            one = rest(given, mask, known, blocks=blocks)
            np.testing.assert_allclose(one.score, expected, rtol=2e-7)


def attention_inputs() -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(2, 3, 2, 4)).astype(np.float32))
    rows = jnp.asarray(rng.normal(size=(2, 3, 9, 8)).astype(np.float32))
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tokens"), [("one", 8), ("opt-one", 0)])
def test_a_tail_brings_the_scores_nearer_to_the_full_cache(name, tokens):
    """The first layer alone: on the host, its query is its own, so speculation is exact."""
    model = random_model(name)
    full = full_scores(model)
    without = scores_of(model, dataclasses.replace(TAILED, tail=False))
    with_tail = scores_of(model, dataclasses.replace(TAILED, tail_tokens=tokens))
    assert np.abs(with_tail - full).mean() < 0.9 * np.abs(without - full).mean()


def with_mean_key(name: str) -> Model:
    """Return a model with a mean key; centred scores plus the constant equal the plain scores."""
    model = random_model(name)
    config = model.config
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    mean = np.random.default_rng(4).normal(size=shape).astype(np.float32)
    return dataclasses.replace(model, key_mean=mean)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("one", {}),
        pytest.param("gemma2", {"query": "own"}, marks=pytest.mark.slow),  # with a soft cap
        pytest.param("gemma2", {}, marks=pytest.mark.slow),
        pytest.param("one", {"alpha": 4.0}, marks=pytest.mark.slow),
        pytest.param("opt", {}, marks=pytest.mark.slow),
    ],
)
def test_a_tail_of_single_tokens_equals_the_full_cache(name, changes):
    """The index has every key, and the sums every value, so nothing is lost."""
    model = with_mean_key(name)
    policy = dataclasses.replace(TAILED, tail_tokens=1, budget=0.05, **changes)
    np.testing.assert_allclose(scores_of(model, policy), full_scores(model), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_mean_key_does_not_enter_the_mean_of_all_others_twice():
    policy = dataclasses.replace(TAILED, tail_tokens=0)
    models = random_model("gemma2"), with_mean_key("gemma2")
    without, with_mean = (scores_of(model, policy) for model in models)
    np.testing.assert_allclose(with_mean, without, rtol=1e-4, atol=1e-4)
