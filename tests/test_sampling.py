"""Sampling against its definition, on logits that hypothesis makes up."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from infinigen_jax.errors import InputError
from infinigen_jax.sampling import Sampling, row_keys, sample

ROWS, VOCABULARY = 3, 17

# Few distinct values, so that ties are frequent.
LOGITS = arrays(
    np.float32,
    (ROWS, VOCABULARY),
    elements=st.integers(-40, 40).map(lambda i: i / 4) | st.just(-np.inf),
).filter(lambda logits: bool(np.isfinite(logits).any(axis=1).all()))
STEPS = st.integers(0, 1000)


def keys(step=0, seed=0, rows=ROWS):
    return row_keys(seed, jnp.arange(rows), step)


@functools.partial(jax.jit, static_argnums=1)
def draw(logits, sampling, step):
    return sample(logits, sampling, keys(step))


def draw_many(logits, sampling, count=4000):
    """Frequencies of each token, from rows with the same logits."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    tokens = sample(rows, sampling, keys(rows=count))
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / count


@given(LOGITS, STEPS, st.sampled_from([0.01, 1.0, 50.0]))
def test_only_the_likeliest_left_is_greedy(logits, step, temperature):
    expected = logits.argmax(axis=1)
    for top_k, top_p in ((1, 1.0), (0, 1e-9), (5, 1e-9)):
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        tokens = draw(logits, sampling, step)
        assert tokens.dtype == jnp.int32
        np.testing.assert_array_equal(tokens, expected)


@given(LOGITS, STEPS)
def test_zero_temperature_is_greedy_and_needs_no_keys(logits, step):
    for dtype in (jnp.float32, jnp.bfloat16):
        tokens = sample(jnp.asarray(logits, dtype), Sampling(top_k=3, top_p=0.5))
        assert tokens.dtype == jnp.int32
        expected = np.asarray(jnp.asarray(logits, dtype).astype(jnp.float32)).argmax(axis=1)
        np.testing.assert_array_equal(tokens, expected)


def allowed_tokens(logits, temperature, top_k, top_p):
    """The tokens that may be drawn, in plain NumPy and float64."""
    order = np.argsort(-logits, kind="stable")[: top_k or len(logits)]
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    mass = np.cumsum(weights) / weights.sum()
    # The tolerance admits a token whose need hangs on float32 rounding of the mass.
    needed = np.concatenate([[True], mass[:-1] < top_p + 1e-5])
    return set(order[needed & (weights > 0)])


@given(
    LOGITS,
    STEPS,
    st.sampled_from([0.3, 1.0, 4.0]),
    st.sampled_from([0, 2, 5, VOCABULARY, 10 * VOCABULARY]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
)
def test_draws_stay_among_the_allowed_tokens(logits, step, temperature, top_k, top_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    for row, token in zip(logits, np.asarray(draw(logits, sampling, step)), strict=True):
        assert token in allowed_tokens(row, temperature, top_k, top_p)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_k": 3}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_p": 0.65}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.75}, [0, 2 / 9, 3 / 9, 4 / 9]),
        # Of the three tokens left the likeliest two have 7/9 of the mass, above 0.75.
        ({"top_k": 3, "top_p": 0.75}, [0, 0, 3 / 7, 4 / 7]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
    ],
)
def test_frequencies(settings, expected):
    sampling = dataclasses.replace(Sampling(temperature=1.0), **settings)
    found = draw_many(np.log([0.1, 0.2, 0.3, 0.4]), sampling)
    # Four standard deviations of a frequency of 1/2 among 4000.
    np.testing.assert_allclose(found, expected, atol=4 * 0.5 / 4000**0.5)
    assert not found[np.asarray(expected) == 0].any()


@given(LOGITS, STEPS, st.integers(0, 2**32 - 1))
def test_a_row_does_not_depend_on_the_others(logits, step, seed):
    sampling = Sampling(temperature=1.5, top_k=9, top_p=0.95)
    together = sample(jnp.asarray(logits), sampling, keys(step, seed))
    for row in range(ROWS):
        own = row_keys(seed, jnp.array([row]), step)
        alone = sample(jnp.asarray(logits[row : row + 1]), sampling, own)
        assert alone[0] == together[row]


def test_keys_differ_by_seed_row_and_step():
    every = [keys(step, seed) for step in range(4) for seed in (0, 1, 2**32 - 1)]
    data = np.concatenate([jax.random.key_data(some) for some in every])
    assert len(np.unique(data, axis=0)) == len(data)


def test_keys_under_jit_with_traced_arguments():
    steps = jnp.array([4, 7, 9], jnp.int32)
    traced = jax.jit(row_keys)(jnp.uint32(5), jnp.arange(ROWS), steps)
    for row, step in enumerate([4, 7, 9]):
        assert traced[row] == row_keys(5, jnp.arange(ROWS), step)[row]


def test_keys_are_required_for_drawing():
    with pytest.raises(ValueError, match="keys"):
        sample(jnp.zeros((1, 4)), Sampling(temperature=1.0))


def test_tiny_temperatures_stay_finite():
    logits = jnp.array([[1e30, -1e30, 1e30 * 0.99]], jnp.float32)
    for temperature in (1e-5, 1e-30):
        assert sample(logits, Sampling(temperature=temperature), keys(rows=1))[0] == 0


@pytest.mark.parametrize(
    "option, value",
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_invalid_settings_are_refused_by_name(option, value):
    with pytest.raises(InputError, match=option):
        Sampling(**{option: value})
