"""Skewing: invariants of a basis, optimality of the balanced one, and moments at other positions.

Entries of a basis are never compared (signs and degenerate subspaces are free), invariants are.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime import moments_of, random_model, slow_except

from infinigen_jax.convert.calibrate import Calibrator, windows
from infinigen_jax.models.rope import Rope, rotate
from infinigen_jax.skew.basis import (
    QUERY_RIDGE,
    absorb,
    balanced_basis,
    guess_moments,
    reduced_rank_basis,
    svd_basis,
)
from infinigen_jax.skew.positions import mean_over_positions, offsets
from infinigen_jax.skew.tail_moments import BlockMoments


def decaying(rng: np.random.Generator, tokens: int, heads: int, size: int) -> np.ndarray:
    """Return vectors [tokens, heads, size], off centre, whose energy decays along a direction."""
    turn = np.linalg.qr(rng.normal(size=(size, size)))[0]
    spread = 0.7 ** np.arange(size)
    return rng.normal(size=(tokens, heads, size)) * spread @ turn + rng.normal(size=size) * 0.3


shapes = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4, 6, 8])
)


@given(shapes)
def test_a_basis_absorbed_turns_every_head(shape):
    """Weights and biases turn, so that scores of heads turned alike are kept."""
    seed, kv_heads, group, d = shape
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(kv_heads, d, d)))[0]
    width = kv_heads * group * d
    x, w, b = rng.normal(size=(5, 7)), rng.normal(size=(7, width)), rng.normal(size=width)
    plain = (x @ w + b).reshape(5, kv_heads, group, d)
    skewed = (x @ absorb(w, basis) + absorb(b, basis)).reshape(plain.shape)
    np.testing.assert_allclose(skewed, np.einsum("skgd,kdc->skgc", plain, basis), atol=1e-10)


@given(shapes)
def test_skewed_queries_are_uncorrelated_with_descending_energy(shape):
    seed, kv_heads, group, d = shape
    rng = np.random.default_rng(seed)
    q, k = decaying(rng, 4 * d, kv_heads * group, d), decaying(rng, 4 * d, kv_heads, d)
    basis, energies = svd_basis(moments_of(q, k))
    energies *= 4 * d * group
    identity = np.broadcast_to(np.eye(d), basis.shape)
    np.testing.assert_allclose(basis.swapaxes(1, 2) @ basis, identity, atol=1e-12)
    assert np.all(np.diff(energies, axis=-1) <= 0)
    for head in range(kv_heads):
        stacked = q.reshape(4 * d, kv_heads, group, d)[:, head].reshape(-1, d)
        skewed, bound = stacked @ basis[head], 1e-10 * energies[head, 0]
        np.testing.assert_allclose(skewed.T @ skewed, np.diag(energies[head]), atol=bound)
        # The singular values of the queries themselves: the Gram route loses nothing.
        singular = np.linalg.svd(stacked, compute_uv=False)
        np.testing.assert_allclose(energies[head], singular**2, atol=bound)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_rank_deficient_queries_still_give_a_complete_basis(rank):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(20, 1, rank)) @ rng.normal(size=(rank, 8))
    k = rng.normal(size=(20, 1, 8))
    basis, energies = svd_basis(moments_of(q, k))
    np.testing.assert_allclose(basis[0].T @ basis[0], np.eye(8), atol=1e-12)
    assert np.all(energies[0, rank:] <= 1e-10 * max(energies[0, 0], 1.0))
    query, key = balanced_basis(moments_of(q, k))
    np.testing.assert_allclose(query[0] @ key[0].T, np.eye(8), atol=1e-8)


@given(shapes)
def test_balanced_factors_are_inverse_and_equally_spread(shape):
    seed, kv_heads, group, d = shape
    rng = np.random.default_rng(seed)
    q, k = decaying(rng, 6 * d, kv_heads * group, d), decaying(rng, 6 * d, kv_heads, d)
    seen = moments_of(q, k)
    query, key = balanced_basis(seen)
    identity = np.broadcast_to(np.eye(d), query.shape)
    np.testing.assert_allclose(query @ key.swapaxes(1, 2), identity, atol=1e-8)
    # Second moment of h B and covariance of k C are both diag(D), up to the ridges.
    queries = query.swapaxes(1, 2) @ seen.query_gram @ query
    keys = key.swapaxes(1, 2) @ seen.key_covariance @ key
    ridge = QUERY_RIDGE * np.trace(seen.query_gram, axis1=1, axis2=2)[:, None, None] / d
    spread = np.einsum("kdd->kd", queries + ridge * query.swapaxes(1, 2) @ query)
    assert np.all(np.diff(spread, axis=-1) <= 1e-9 * spread[:, :1])
    bound = 0.02 * spread[:, :1]
    assert np.all(np.abs(queries - spread[:, None] * np.eye(d)) <= bound[..., None])
    assert np.all(np.abs(keys - spread[:, None] * np.eye(d)) <= bound[..., None])


def guessing(seed: int, tokens: int = 200, noise: float = 0.7):
    """Return queries, guesses with a map and noise as errors, and keys: 2 per KV head."""
    rng = np.random.default_rng(seed)
    q, k = decaying(rng, tokens, 2, 6), decaying(rng, tokens, 1, 6)
    h = q @ (np.eye(6) + 0.3 * rng.normal(size=(6, 6))) + noise * rng.normal(size=q.shape)
    return q, h, k


def expected_error(q, h, k, factors: tuple[np.ndarray, np.ndarray]) -> float:
    """Return E (q.(k - mu) - (B^T h).(C^T (k - mu)))^2 over all pairs of query and key."""
    centred = k[:, 0] - k[:, 0].mean(axis=0)
    b, c = factors
    left = q.reshape(-1, 6) - h.reshape(-1, 6) @ b @ c.T
    return float(np.square(left @ centred.T).mean())


@given(st.integers(0, 2**32 - 1))
def test_reduced_rank_factors_are_best_for_the_guess(seed):
    """Against other factors of the same rank, and the residual by the formula."""
    q, h, k = guessing(seed)
    seen, guess = moments_of(q, k), guess_moments(h, q, 1)
    b, c = (x[0] for x in reduced_rank_basis(seen, guess))
    spread = np.diag(b.T @ guess.gram[0] @ b)
    plain = [x[0] for x in balanced_basis(seen)]
    orthogonal = svd_basis(seen)[0][0]
    total = float(np.trace(seen.query_gram[0] @ seen.key_covariance[0]))
    before = np.inf
    for r in range(1, 7):
        error = expected_error(q, h, k, (b[:, :r], c[:, :r]))
        # The ridges move the optimum by about their own size.
        assert error <= before + 1e-3 * total
        left = total - np.square(spread[:r]).sum()
        np.testing.assert_allclose(error, left, atol=2e-3 * total + 1e-3 * error)
        for other in ((plain[0], plain[1]), (orthogonal, orthogonal)):
            turned = (other[0][:, :r], other[1][:, :r])
            assert error <= expected_error(q, h, k, turned) + 1e-3 * total
        before = error


def test_reduced_rank_factors_at_full_rank_are_the_regression_of_the_query():
    q, h, k = guessing(4)
    seen, guess = moments_of(q, k), guess_moments(h, q, 1)
    b, c = reduced_rank_basis(seen, guess)
    slope = np.linalg.lstsq(h.reshape(-1, 6), q.reshape(-1, 6))[0]
    np.testing.assert_allclose(b[0] @ c[0].T, slope, atol=5e-3)
    # The true query's scores from the index, for any guess.
    true = np.linalg.solve(c[0], q.reshape(-1, 6).T).T @ (k[:, 0] @ c[0]).T
    np.testing.assert_allclose(true, q.reshape(-1, 6) @ k[:, 0].T, atol=1e-6)


ROPE = Rope(theta=100.0)
turn = jax.jit(rotate, static_argnums=2)


def standing_at(place: int, rope: Rope, *vectors: np.ndarray) -> list[np.ndarray]:
    """Return vectors [t, heads, d] of a text whose first token is at this position."""
    return [
        np.asarray(turn(jnp.asarray(x), jnp.arange(len(x), dtype=jnp.int32) + place, rope))
        for x in vectors
    ]


@given(
    st.sampled_from([1, 2, 7, 40]),
    st.sampled_from([(2, 1.0), (6, 1.0), (6, 0.75), (8, 0.75)]),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_the_closed_form_is_the_mean_over_all_places(number, size, seed, scaled):
    """Queries and keys may be multiplied by factors after the rotation."""
    d, share = size
    rope = dataclasses.replace(ROPE, share=share)
    rng = np.random.default_rng(seed)
    q, guess, k, values = (
        rng.normal(1.0, 1.0, size=(9, heads, d)).astype(np.float32) for heads in (4, 4, 2, 2)
    )
    factors = rng.uniform(0.5, 2.0, size=(2, d)) if scaled else np.ones((2, d))
    of_query, of_key = factors
    places = [
        (turned[0] * of_query, turned[1] * of_query, turned[2] * of_key)
        for turned in (standing_at(place, rope, q, guess, k) for place in range(number))
    ]
    seen = [moments_of(q, k) for q, _, k in places]
    guesses = [guess_moments(guess, q, 2) for q, guess, _ in places]
    blocks = [
        BlockMoments(*(np.einsum("tkd,tke->kde", k, x) for x in (k, values))) for *_, k in places
    ]
    for of_places in (seen, guesses, blocks):
        found = mean_over_positions(of_places[0], rope, number, *factors)
        for mean, *each in zip(found, *of_places, strict=True):
            np.testing.assert_allclose(mean, np.mean(each, axis=0), rtol=1e-4, atol=5e-6)


def test_places():
    assert offsets(None, 1000, 10) == 1  # learned positions
    assert offsets(ROPE, 1000, 1000) == offsets(ROPE, 1000, 1001) == 1
    assert offsets(ROPE, 1000, 600) == 401
    dynamic = dataclasses.replace(ROPE, kind="dynamic", factor=4.0, original_positions=250)
    assert offsets(dynamic, 1000, 100) == 151


def calibrated(ids: np.ndarray, config, model):
    """Return moments of layer 1 and of its guessed query, over one window."""
    cut = dataclasses.replace(config, max_positions=len(ids))
    text = windows(ids, cut, 1000, "text", b"")
    calibrator = Calibrator(config, text, model.params["embedding"], speculate_from="input")
    for params in model.params["layers"][:2]:
        found = calibrator.layer(params)
    return calibrator.extend_to_all_positions(found, params), calibrator.ahead(params)[1]


@pytest.mark.parametrize("name", slow_except(["gqa", "qwen3"], "gqa"))
def test_calibration_is_as_if_the_text_stood_everywhere(name):
    model = random_model(name)
    ids = np.random.default_rng(3).integers(3, 96, 20).astype(np.int32)
    config: Any = dataclasses.replace(model.config, max_positions=20)
    near = calibrated(ids, config, model)
    far = calibrated(ids, dataclasses.replace(config, max_positions=25), model)
    means = [mean_over_positions(x, config.rope, 6) for x in near]
    for found, wanted in zip(far, means, strict=True):
        for value, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-12)
    assert np.abs(far[0].key_mean - near[0].key_mean).max() > 0.005
