"""The tail and its values, predicted from the index: against NumPy, and where they are exact."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime import TAILED, finished, full_scores, numbers, random_model, score, scores_of, slow
from tiny import normal, refuses

from infinigen_jax import Engine, Full, InfiniGen, Model
from infinigen_jax.cache.layers import Resident, Slots
from infinigen_jax.convert.calibrate import DEFAULT_TEXT, SINKS
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.ops.attention import Tail, attend, attend_weighted, packed
from infinigen_jax.selection.select import Request, log_rest, select
from infinigen_jax.skew.tail_moments import block_products
from infinigen_jax.speculation.index import IndexFormat
from infinigen_jax.speculation.tail import RIDGE, fit_slope, predicted, without_predicted


@pytest.mark.parametrize("blocks", [1, 8])
def test_the_rest_is_what_was_not_chosen(blocks):
    """Some, all or no tokens are chosen; by marks, by slots, and with masked scores."""
    rng = np.random.default_rng(7)
    scores = rng.normal(100, 1, size=(3, 2, 2, 128)).astype(np.float32)  # overflow without a peak
    eligible = rng.random((3, 1, 128)) < np.array([0.8, 0.1, 0.8])[:, None, None]
    choose = jax.jit(select, static_argnames=("alpha", "size"))
    cap = jnp.array([20, 20, 0], jnp.int32)
    request = choose(scores, eligible, alpha=math.inf, cap=cap, size=20)
    left = np.where((eligible & ~np.asarray(request.chosen))[:, :, None], scores, -np.inf)
    left = left.reshape(3, 2, 2, blocks, -1).astype(np.float64)
    expected = np.logaddexp.reduce(left, axis=-1)
    assert np.isneginf(expected[1]).all() and np.isfinite(expected[::2]).all()
    rest = jax.jit(log_rest, static_argnames="blocks")
    by_marks = request._replace(chosen=None)
    masked = np.where(eligible[:, :, None], scores, -np.inf)
    for known in (request, by_marks, by_marks._replace(marks=None)):
        for values, mask in ((scores, eligible), (masked, None)):
            one = rest(values, mask, known, blocks=blocks)
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


def with_mean_key(name: str) -> Model:
    """Return a model with a mean key; centred scores plus the constant equal the plain scores."""
    model = random_model(name)
    config = model.config
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    mean = np.random.default_rng(4).normal(size=shape).astype(np.float32)
    return dataclasses.replace(model, key_mean=mean)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("one", {}), slow("one", {"alpha": 4.0}), slow("opt", {}), slow("gemma2", {})]
    + [slow("gemma2", {"query": "own"})],  # with a soft cap
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


@given(st.sampled_from([1, 64, 150]), st.integers(0, 2**32))
def test_products_are_of_what_differs_from_the_block(length, seed):
    random = np.random.default_rng(seed)
    keys, values = normal(length, 2, 4, seed=seed), normal(length, 2, 4, seed=seed + 1)
    counted = random.random(length) < 0.7
    gram, cross = np.zeros((2, 4, 4)), np.zeros((2, 4, 4))
    for start in range(0, length, 64):
        block = np.flatnonzero(counted[start : start + 64]) + start
        k, v = (x[block] - (x[block].mean(axis=0) if len(block) else 0) for x in (keys, values))
        gram += np.einsum("skd,ske->kde", k, k)
        cross += np.einsum("skd,ske->kde", k, v)
    found = jax.jit(block_products)(jnp.asarray(keys), jnp.asarray(values), jnp.asarray(counted))
    np.testing.assert_allclose(found[0], gram, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1], cross, rtol=1e-4, atol=1e-4)


def test_the_slope_is_the_one_of_least_squares():
    """For any basis, and for some of its columns."""
    keys, basis = normal(2, 500, 6), np.linalg.qr(normal(2, 6, 6, seed=1))[0]
    values = np.einsum("ksd,kde->kse", keys, normal(2, 6, 6, seed=2)) + normal(2, 500, 6, seed=3)
    gram = np.einsum("ksd,kse->kde", keys, keys)
    cross = np.einsum("ksd,kse->kde", keys, values)
    for columns in (2, 6):
        slope = fit_slope(gram, cross, basis[..., :columns])
        for head in range(2):
            entries = keys[head] @ basis[head, :, :columns]
            expected = np.linalg.lstsq(entries, values[head], rcond=None)[0]
            np.testing.assert_allclose(slope[head], expected, atol=0.02)
    uneven = np.einsum("kse,ksd->ked", *[normal(2, 500, 16) * np.geomspace(1, 1e-3, 16)] * 2)
    ridge = RIDGE * np.trace(uneven, axis1=1, axis2=2)[:, None, None] / 16
    right = normal(2, 16, 16)
    slope = fit_slope(uneven, right, np.stack([np.eye(16)] * 2))
    expected = np.linalg.solve(uneven + ridge * np.eye(16), right)
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    nothing = fit_slope(np.zeros((1, 4, 4)), np.zeros((1, 4, 4)), np.eye(4)[None])
    np.testing.assert_array_equal(nothing, 0)  # where all keys are equal


@pytest.mark.parametrize(("family", "skew"), [("opt", "svd"), ("llama", "balanced")])
def test_a_conversion_measures_the_keys_and_values_that_are_cached(tiny, tmp_path, family, skew):
    """In the coordinates of the cache: an absorbed basis has turned the keys."""
    made, tokens = tiny(family, max_position_embeddings=128), list(range(3, 67))
    convert(made.folder, tmp_path / "converted", calibration=tokens, skew=skew)
    model = checkpoint.load(tmp_path / "converted", "float32")
    assert model.tail_moments is not None
    made = Engine(model, policy=Full(), dense_layers=0)
    cache = made.start([[*tokens, 3]], max_new_tokens=2).cache
    rows = jnp.asarray(np.asarray(cache.host)[:, 0, :, : len(tokens)].swapaxes(1, 2))
    keys, values = jnp.split(rows, 2, axis=-1)
    for layer in range(model.config.num_layers):
        counted = jnp.arange(len(tokens)) >= SINKS
        found = block_products(keys[layer], values[layer], counted)
        if family == "opt":  # for others they are of all positions
            for measured, expected in zip(model.tail_moments, found, strict=True):
                products = len(tokens) * measured[layer]
                np.testing.assert_allclose(products, expected, rtol=1e-3, atol=1e-2)
        total = np.trace(found[0], axis1=1, axis2=2)
        measured = np.trace(model.tail_moments[0][layer], axis1=1, axis2=2)
        np.testing.assert_allclose(len(tokens) * measured, total, rtol=0.05)


SLOTS = Slots(4, 32, 64)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
@pytest.mark.parametrize("with_basis", [True, False])
def test_values_that_follow_from_their_keys_are_attended_exactly(dtype, tolerance, with_basis):
    """For any fetched rows, and any weights within a block."""
    b, k, g, d, t = 2, 2, 3, 8, 256
    keys, q = normal(b, k, t, d), 2 * normal(b, k, g, d, seed=1)
    linear = normal(k, d, d, seed=2)
    by_block = np.repeat(normal(b, k, t // 64, d, seed=3), 64, axis=2)
    values = np.einsum("bktd,kde->bkte", keys, linear) + by_block
    basis = normal(k, d, d, seed=4) if with_basis else np.broadcast_to(np.eye(d), (k, d, d))
    basis = jnp.asarray(basis, jnp.float32)
    weights = {"slope": jnp.einsum("kcd,kde->kce", jnp.linalg.inv(basis), linear)}
    weights |= {"leading": basis} if with_basis else {}
    weights["centre"] = jnp.asarray(normal(k, d, seed=5))
    entries = jnp.einsum("bktd,kdc->bkct", keys, basis) - weights["centre"][None, :, :, None]
    own = jnp.einsum("bkgd,kcd->bkgc", q, jnp.linalg.inv(basis))

    index, positions = IndexFormat(dtype, d), jnp.array([t - 1, 180], jnp.int32)
    request = Request(jnp.broadcast_to(jnp.arange(40, 50), (b, k, 10)), jnp.full((b, k), 10))
    rest = index.log_rest(own, index.encode(entries), request, positions, SLOTS, d)
    # The centre's share of a score is the same for all tokens.
    centre = jnp.einsum("bkgc,kc->bkg", own, weights["centre"])[..., None]
    there = SLOTS.eligible(positions, t)[:, 0]
    less = without_predicted(weights, jnp.asarray(keys), jnp.asarray(values))
    left = jnp.where(there[:, None, :, None], less, 0.0).reshape(b, k, 4, 64, d)
    sums = jnp.sum(left, axis=3)
    count = jnp.sum(there.reshape(b, 1, 4, 64), axis=-1, dtype=jnp.int32)
    entry: Any = rest.entry
    tail = Tail(rest.score + centre, sums, count, predicted(weights, entry))

    rows = jnp.concatenate([keys, values], axis=-1)
    past = jnp.arange(t)[None] <= positions[:, None]
    fetched = ((jnp.arange(t) >= 40) & (jnp.arange(t) < 50))[None]
    part = packed(rows, (past & (~there | fetched))[:, None])
    got = attend_weighted(jnp.asarray(q), part, tail=tail)[0]
    expected = attend(jnp.asarray(q), packed(rows, past[:, None]))
    np.testing.assert_allclose(got, expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "columns", "tokens"),
    [("int4", 1, 128), ("int4", 5, 128), ("int4", 16, 128), ("int4", 8, 4096), ("float32", 5, 128)],
)
def test_sums_of_entries(name, columns, tokens):
    """Sums of the keys in the index, which its scores by unit vectors reveal."""
    index, keys = IndexFormat(name, 20), jnp.asarray(normal(2, 3, 20, tokens))
    weights, entries = jnp.asarray(normal(2, 3, 2, tokens, seed=1)), index.encode(keys)
    units = jnp.broadcast_to(jnp.eye(20), (2, 3, 20, 20))
    decoded = index.scores(units, entries)
    if index.quantised:  # less the variance of a code's rounding
        decoded = decoded + rounding(entries)
    expected = np.einsum("bkgt,bkct->bkgc", weights, decoded[:, :, :columns])
    tolerance = 1e-4 if tokens == 128 else 1e-3
    np.testing.assert_allclose(index.sums(weights, entries, columns), expected, atol=tolerance)


def rounding(entries: jnp.ndarray) -> np.ndarray:
    """Return the variance of a code's rounding, missing in unit-vector scores: [b, k, 1, t]."""
    step = (np.asarray(entries)[:, :, -1:] >> 16 << 16).view(np.float32)
    return np.square(step) / 24


@pytest.mark.slow
def test_a_trained_model_comes_nearer_to_the_full_cache():
    model = checkpoint.load(checkpoint.embedded("tiny-opt"))
    tokens = np.array(model.tokenizer.encode(DEFAULT_TEXT.read_text(encoding="utf-8")))[:312]
    found = []
    sparse = InfiniGen(budget=0.05, window=32)
    for policy in (Full(), sparse, dataclasses.replace(sparse, tail_columns=0)):
        run = Engine(model, policy=policy).start([tokens[:300].tolist()], max_new_tokens=12)
        pairs = zip(tokens[300:-1], tokens[301:], strict=True)
        found.append([float(score(run, np.array([a]), np.array([b]))[0]) for a, b in pairs])
    full, both, means = map(np.array, found)
    assert np.abs(both - full).mean() < 0.5 * np.abs(means - full).mean()


def test_a_prompt_in_chunks_and_decoded_tokens_leave_the_same_sums():
    """Both match one chunk of all tokens; one answer crosses a block boundary."""
    model = random_model("one")
    policy = dataclasses.replace(TAILED, tail_columns=16, tail_tokens=64)
    given = {"policy": policy, "dense_layers": 0}
    whole, chunks = (Engine(model, prefill_chunk=chunk, **given) for chunk in (256, 64))
    prompts = [numbers(150), numbers(124)]
    runs = [finished(engine, prompts, 12) for engine in (whole, chunks)]
    assert runs[0].new_tokens == runs[1].new_tokens
    answers = [prompt + new[:-1] for prompt, new in zip(prompts, runs[0].new_tokens, strict=True)]
    expected = whole.start(answers, max_new_tokens=1)  # the last tokens are not cached
    for run in runs:
        assert run.cache.lengths.tolist() == expected.cache.lengths.tolist() == [161, 135]
        for x, y in zip(run.cache.local, expected.cache.local, strict=True):
            assert isinstance(x, Resident) and isinstance(y, Resident)
            assert x.left is not None and y.left is not None
            np.testing.assert_allclose(x.left, y.left, atol=1e-4)


def test_without_moments_or_blocks_there_is_nothing_to_predict_by():
    with_ = random_model("gqa")
    without = dataclasses.replace(with_, tail_moments=None)
    for model, pooled, expected in ((with_, False, 8), (with_, True, 0), (without, False, 0)):
        assert InfiniGen().fitted(model, True, pooled).tail_columns == expected
    assert InfiniGen(tail=False).fitted(with_, True, False).tail_columns == 0
    refuses("tail_columns 17: it must be at least 0 and at most 16", InfiniGen, tail_columns=17)
