"""Integer codes: error bounds of a group, packing, NaN and infinities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinigen_jax.ops.quantize import affine_codes

codes_of = jax.jit(affine_codes, static_argnames="bits")
GROUP = 16


@pytest.mark.parametrize("bits", [4, 8])
@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**31),
    offset=st.sampled_from([0.0, 0.3, -7.0, 1e3, -1e5]),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 300.0, 1e30]),
)
def test_half_a_step_bounds_the_error(bits, seed, offset, scale):
    x = np.random.default_rng(seed).normal(size=(5, GROUP)) * scale + offset
    x = np.asarray(x, np.float32)
    codes, step, low = (np.asarray(y) for y in codes_of(jnp.asarray(x), bits=bits))
    assert codes.dtype == np.uint8 and codes.max() < 2**bits
    back = low.astype(np.float64) + step.astype(np.float64) * codes
    largest = np.abs(x).max(axis=-1, keepdims=True).astype(np.float64)
    assert (np.abs(back - x) <= step / 2 + 2.0**-22 * largest + 1e-37).all()
    span = x.max(axis=-1, keepdims=True).astype(np.float64) - x.min(axis=-1, keepdims=True)
    lowest = np.abs(x.min(axis=-1, keepdims=True))
    most = (1 + 2.0**-7) * (span + 2.0**-7 * lowest) / (2**bits - 1)
    assert (step <= most * (1 + 1e-6) + 2.0**-126).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_the_extremes_of_a_group_come_back_nearly_exactly(bits):
    """Per-row groups keep rows with one outlier accurate."""
    x = np.random.default_rng(0).normal(size=(40, GROUP)).astype(np.float32)
    x[:, 3] = 100
    codes, step, low = (np.asarray(y) for y in codes_of(jnp.asarray(x), bits=bits))
    np.testing.assert_allclose((low + step * codes)[:, 3], 100, rtol=2.0**-7)


def test_equal_numbers_come_back_almost_equal_and_zeros_exactly():
    for number in (0.0, 1.0, -3.7, 1e-40, 6e4):
        codes, step, low = codes_of(jnp.full((1, GROUP), number, jnp.float32), bits=4)
        back = np.asarray(low + step * codes.astype(jnp.float32))
        assert np.abs(back - number).max() <= 2.0**-11 * abs(number) + 2.0**-126
        assert number != 0 or not back.any()


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_group_with_an_odd_number_is_nan_and_its_neighbours_are_not(odd):
    x = np.ones((3, GROUP), np.float32)
    x[1, 5] = odd
    codes, step, low = codes_of(jnp.asarray(x), bits=8)
    back = np.asarray(low + step * codes.astype(jnp.float32))
    assert np.isnan(back[1]).all() and np.isfinite(back[[0, 2]]).all()
