"""Reductions in pieces, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from infinigen_jax.ops.reductions import MULTIPLE, best, summed


@pytest.mark.parametrize("groups", [1, 64, 67])
def test_sums_of_terms(groups):
    """Numbers of groups with and without a suitable divisor."""
    random = np.random.default_rng(groups)
    x, y = random.normal(size=(2, 3, groups * MULTIPLE)).astype(np.float32)
    found = summed(lambda x, y: x * y, jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_allclose(found, (x.astype(np.float64) * y).sum(axis=-1), atol=1e-3)


@pytest.mark.parametrize("tokens", [1, MULTIPLE - 1, MULTIPLE, 6 * MULTIPLE, 67 * MULTIPLE])
def test_the_best(tokens):
    x = np.random.default_rng(tokens).normal(size=(2, 3, tokens)).astype(np.float32)
    x[0, 0] = -np.inf
    np.testing.assert_array_equal(best(jnp.asarray(x)), x.max(axis=-1))
