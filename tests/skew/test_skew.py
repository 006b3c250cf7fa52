"""Skewing: invariants of a basis, and optimality of the balanced one.

Entries of a basis are never compared (signs and degenerate subspaces are free), invariants are.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinigen_jax.skew.basis import (
    absorb,
    balanced_basis,
    guess_moments,
    moments,
    reduced_rank_basis,
    svd_basis,
)


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
    basis, energies = svd_basis(moments(q, k))
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


def test_covariance_of_keys():
    rng = np.random.default_rng(0)
    q, k = decaying(rng, 30, 4, 6), decaying(rng, 30, 2, 6)
    centred = k - k.mean(axis=0)
    covariance = np.einsum("tkd,tke->kde", centred, centred) / 30
    np.testing.assert_allclose(moments(q, k).key_covariance, covariance, atol=1e-12)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_rank_deficient_queries_still_give_a_complete_basis(rank):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(20, 1, rank)) @ rng.normal(size=(rank, 8))
    k = rng.normal(size=(20, 1, 8))
    basis, energies = svd_basis(moments(q, k))
    np.testing.assert_allclose(basis[0].T @ basis[0], np.eye(8), atol=1e-12)
    assert np.all(energies[0, rank:] <= 1e-10 * max(energies[0, 0], 1.0))
    query, key, _ = balanced_basis(moments(q, k))
    np.testing.assert_allclose(query[0] @ key[0].T, np.eye(8), atol=1e-8)


# The balanced basis.


@given(shapes)
def test_balanced_factors_are_inverse_and_equally_spread(shape):
    seed, kv_heads, group, d = shape
    rng = np.random.default_rng(seed)
    q, k = decaying(rng, 6 * d, kv_heads * group, d), decaying(rng, 6 * d, kv_heads, d)
    seen = moments(q, k)
    query, key, spread = balanced_basis(seen)
    identity = np.broadcast_to(np.eye(d), query.shape)
    np.testing.assert_allclose(query @ key.swapaxes(1, 2), identity, atol=1e-8)
    assert np.all(np.diff(spread, axis=-1) <= 0)
    # Second moment of h B and covariance of k C are both diag(D), up to the ridges.
    queries = query.swapaxes(1, 2) @ seen.query_gram @ query / (seen.tokens * group)
    keys = key.swapaxes(1, 2) @ seen.key_covariance @ key
    bound = 0.02 * spread[:, :1]
    assert np.all(np.abs(np.einsum("kcc->kc", queries) - spread) <= bound)
    assert np.all(np.abs(np.einsum("kcc->kc", keys) - spread) <= bound)


def test_balanced_residual_is_the_dropped_spectrum():
    rng = np.random.default_rng(5)
    q, k = decaying(rng, 200, 2, 6), decaying(rng, 200, 1, 6)
    seen = moments(q, k)
    query, key, spread = balanced_basis(seen)
    s, sigma = seen.query_gram[0] / 400, seen.key_covariance[0]
    for r in range(7):
        left = np.eye(6) - query[0, :, :r] @ key[0, :, :r].T
        residual = np.trace(left.T @ s @ left @ sigma)
        expected = np.trace(s @ sigma) - np.square(spread[0, :r]).sum()
        np.testing.assert_allclose(residual, expected, atol=2e-3 * np.trace(s @ sigma))


# The balanced basis for a guessed query.


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
    seen, guess = moments(q, k), guess_moments(h, q, 1)
    b, c, spread = (x[0] for x in reduced_rank_basis(seen, guess))
    plain = [x[0] for x in balanced_basis(seen)]
    orthogonal = svd_basis(seen)[0][0]
    s = seen.query_gram[0] / 400
    total = float(np.trace(s @ seen.key_covariance[0]))
    before = np.inf
    for r in range(1, 7):
        error = expected_error(q, h, k, (b[:, :r], c[:, :r]))
        # The ridges move the optimum by about their own size.
        assert error <= before + 1e-3 * total
        np.testing.assert_allclose(
            error, total - np.square(spread[:r]).sum(), atol=2e-3 * total + 1e-3 * error
        )
        for other in ((plain[0], plain[1]), (orthogonal, orthogonal)):
            turned = (other[0][:, :r], other[1][:, :r])
            assert error <= expected_error(q, h, k, turned) + 1e-3 * total
        before = error


def test_reduced_rank_factors_at_full_rank_are_the_regression_of_the_query():
    q, h, k = guessing(4)
    seen, guess = moments(q, k), guess_moments(h, q, 1)
    b, c, _ = reduced_rank_basis(seen, guess)
    slope = np.linalg.lstsq(h.reshape(-1, 6), q.reshape(-1, 6))[0]
    np.testing.assert_allclose(b[0] @ c[0].T, slope, atol=5e-3)
    # The true query's scores from the index, for any guess.
    true = np.linalg.solve(c[0], q.reshape(-1, 6).T).T @ (k[:, 0] @ c[0]).T
    np.testing.assert_allclose(true, q.reshape(-1, 6) @ k[:, 0].T, atol=1e-6)
