"""Moments at positions that the text does not reach, against texts at these positions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime import random_model

from infinigen_jax.convert.calibrate import Calibrator, windows
from infinigen_jax.models.rope import Rope, rotate
from infinigen_jax.skew.basis import guess_moments, moments
from infinigen_jax.skew.positions import mean_blocks, mean_guess, mean_moments, offsets
from infinigen_jax.skew.tail_moments import BlockMoments

ROPE = Rope(theta=100.0)
turn = jax.jit(rotate, static_argnums=2)


def standing_at(place: int, rope: Rope, *vectors: np.ndarray) -> list[np.ndarray]:
    """Return vectors [t, heads, d] of a text whose first token is at this position."""
    return [
        np.asarray(turn(jnp.asarray(x), jnp.arange(len(x), dtype=jnp.int32) + place, rope))
        for x in vectors
    ]


@settings(max_examples=20, deadline=None)
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
    q, guess, k = (
        rng.normal(1.0, 1.0, size=(9, heads, d)).astype(np.float32) for heads in (4, 4, 2)
    )
    values = rng.normal(1.0, 1.0, size=k.shape).astype(np.float32)
    factors = rng.uniform(0.5, 2.0, size=(2, d)) if scaled else np.ones((2, d))
    of_query, of_key = factors
    places = [
        (turned[0] * of_query, turned[1] * of_query, turned[2] * of_key)
        for turned in (standing_at(place, rope, q, guess, k) for place in range(number))
    ]
    sums = [moments(q, k) for q, _, k in places]
    guesses = [guess_moments(guess, q, 2) for q, guess, _ in places]
    blocks = [
        BlockMoments(*(np.einsum("tkd,tke->kde", k, x) for x in (k, values))) for *_, k in places
    ]
    kinds: list[tuple[Any, list[Any], tuple[str, ...]]] = [
        (mean_moments, sums, ("query_gram", "key_gram", "key_sum")),
        (mean_guess, guesses, ("gram", "cross")),
        (mean_blocks, blocks, BlockMoments._fields),
    ]
    for spread, of_places, names in kinds:
        found = spread(of_places[0], rope, number, *factors)
        for name in names:
            mean = np.mean([getattr(each, name) for each in of_places], axis=0)
            np.testing.assert_allclose(getattr(found, name), mean, rtol=1e-4, atol=1e-4)


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
    return found, calibrator.ahead(model.params["layers"][1])[1]


@pytest.mark.parametrize("name", ["gqa", "qwen3"])
def test_calibration_is_as_if_the_text_stood_everywhere(name):
    model = random_model(name)
    ids = np.random.default_rng(3).integers(3, 96, 20).astype(np.int32)
    config = dataclasses.replace(model.config, max_positions=20)
    assert config.rope is not None
    near = calibrated(ids, config, model)
    far = calibrated(ids, dataclasses.replace(config, max_positions=25), model)
    for found, wanted in zip(
        far,
        (mean_moments(near[0], config.rope, 6), mean_guess(near[1], config.rope, 6)),
        strict=True,
    ):
        for value, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-12)
    assert np.abs(far[0].key_sum - near[0].key_sum).max() > 0.1
