"""Sampling against its definition, on logits that hypothesis makes up, and against transformers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tiny import refuses

from infinigen_jax.sampling import (
    History,
    candidates,
    limited,
    penalised,
    sample,
    settings_of,
    uniforms,
)
from infinigen_jax.settings.sampling import Sampling

BATCH, VOCABULARY = 3, 17

# Few distinct values, so that ties are frequent.
LOGITS = arrays(
    np.float32,
    (BATCH, VOCABULARY),
    elements=st.integers(-40, 40).map(lambda i: i / 4) | st.just(-np.inf),
).filter(lambda logits: bool(np.isfinite(logits).any(axis=1).all()))
STEPS = st.integers(0, 1000)


@jax.jit
def draw_arrays(logits, settings, step):
    streams = jnp.zeros(len(logits), jnp.int32)
    return sample(logits, settings, uniforms(settings.seed, streams, step))


def draw(logits, *sampling, step: Any = 0):
    """Return tokens of each sequence, with settings of its own or the same ones."""
    settings = sampling * (1 if len(sampling) > 1 else len(logits))
    steps = jnp.broadcast_to(jnp.asarray(step, jnp.int32), (len(logits),))
    return draw_arrays(jnp.asarray(logits), jax.device_put(settings_of(settings)), steps)


def draw_many(logits, sampling, count=4000):
    """Return frequencies of each token, one step after the other."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    tokens = draw(rows, sampling, step=np.arange(count, dtype=np.int32))
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / count


@given(LOGITS, STEPS)
def test_rows_of_temperature_zero_are_greedy_in_a_batch_that_samples(logits, step):
    for dtype in (jnp.float32, jnp.bfloat16):
        rounded = jnp.asarray(logits, dtype)
        greedy = Sampling(top_k=3, top_p=0.5)
        tokens = draw(rounded, greedy, Sampling(temperature=3.0), greedy, step=step)
        expected = np.asarray(rounded.astype(jnp.float32)).argmax(axis=1)
        np.testing.assert_array_equal(tokens[::2], expected[::2])


def allowed_tokens(logits, temperature, top_k, top_p, min_p):
    """Return the tokens that may be drawn, in plain NumPy and float64."""
    order = np.argsort(-logits, kind="stable")[: top_k or len(logits)]
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    mass = np.cumsum(weights) / weights.sum()
    # The tolerance admits a token whose need hangs on float32 rounding of the mass.
    needed = np.concatenate([[True], mass[:-1] < top_p + 1e-5])
    return set(order[needed & (weights > 0) & (weights >= min_p * (1 - 1e-5))])


@given(
    LOGITS,
    STEPS,
    st.sampled_from([0.01, 1.0, 50.0]),
    st.sampled_from([0, 1, 5, VOCABULARY, 10 * VOCABULARY]),
    st.sampled_from([1e-9, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.2, 1.0]),
)
def test_draws_stay_among_the_allowed_tokens(logits, step, temperature, top_k, top_p, min_p):
    values = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for row, token in zip(
        logits, np.asarray(draw(logits, Sampling(**values), step=step)), strict=True
    ):
        assert token in allowed_tokens(row, **values)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"top_k": 3}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_p": 0.65}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.75}, [0, 2 / 9, 3 / 9, 4 / 9]),
        # Of the three tokens left the likeliest two have 7/9 of the mass, above 0.75.
        ({"top_k": 3, "top_p": 0.75}, [0, 0, 3 / 7, 4 / 7]),
        ({"min_p": 0.6}, [0, 0, 3 / 7, 4 / 7]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
    ],
)
def test_frequencies(settings, expected):
    count, expected = 4000, np.asarray(expected)
    sampling = dataclasses.replace(Sampling(temperature=1.0), **settings)
    drawn = draw_many(np.log([0.1, 0.2, 0.3, 0.4]), sampling, count)
    assert not drawn[expected == 0].any()
    drawn, expected = drawn[expected > 0], expected[expected > 0]
    # The statistic's quantile of 0.9999 for 3 degrees of freedom.
    assert count * np.sum((drawn - expected) ** 2 / expected) < 21.1


def test_frequencies_of_a_large_vocabulary():
    """Several blocks, a part of one, and settings that differ by sequence."""
    size, count = 700, 4000
    weights = np.random.default_rng(0).random(size) + 0.01
    weights[size // 2 :] = 0
    drawn = draw_many(np.log(np.maximum(weights, 1e-30)), Sampling(temperature=1.0), count)
    expected = weights / weights.sum()
    assert not drawn[expected < 1e-20].any()
    halves = [np.add.reduceat(x, range(0, size // 2, 25)) for x in (drawn[:350], expected[:350])]
    # The quantile of 0.9999 for 13 degrees of freedom.
    assert count * np.sum((halves[0] - halves[1]) ** 2 / halves[1]) < 40


@given(LOGITS, STEPS, st.integers(0, 2**32 - 1))
def test_a_sequence_does_not_depend_on_the_others(logits, step, seed):
    sampling = [
        Sampling(temperature=1.5, top_k=9, top_p=0.95, seed=seed),
        Sampling(temperature=0.7, min_p=0.1, seed=seed),
        Sampling(),
    ]
    together = draw(logits, *sampling, step=step)
    for i in range(BATCH):
        assert draw(logits[i : i + 1], sampling[i], step=step)[0] == together[i]


def test_random_numbers_differ_by_seed_stream_and_step():
    seeds, streams, steps = (x.ravel() for x in np.meshgrid([0, 1, 2**32 - 1], range(4), range(4)))
    given = seeds.astype(np.uint32), streams.astype(np.int32), steps.astype(np.int32)
    numbers = np.asarray(uniforms(*map(jnp.asarray, given)))
    assert len(np.unique(numbers)) == len(numbers)
    assert 0 <= numbers.min() and numbers.max() < 1


@pytest.mark.parametrize("k, ties", [(5, 11), (18, 38), (40, 41)])
def test_top_k_of_equal_logits(k, ties):
    logits = np.full((1, 60), -9.0, np.float32)
    logits[:, :ties] = 2.0
    draws = draw_many(logits[0], Sampling(temperature=1.0, top_k=k), count=2000)
    assert set(np.flatnonzero(draws)) == set(range(k))


def test_tiny_temperatures_stay_finite_and_huge_ones_are_refused():
    logits = jnp.array([[1e30, -1e30, 1e30 * 0.99]], jnp.float32)
    for temperature in (1e-5, 1e-30):
        assert draw(logits, Sampling(temperature=temperature))[0] == 0
    refuses("temperature .* at most", Sampling, temperature=1e308)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.7])
def test_penalties(penalty):
    """Repetition as in transformers; presence and frequency as OpenAI defines them."""
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(1)
    logits = rng.normal(size=(BATCH, VOCABULARY)).astype(np.float32)
    prompt, answer = rng.integers(0, VOCABULARY, (2, BATCH, 6))
    presence, frequency = rng.uniform(-2, 2, (2, BATCH)).astype(np.float32)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    both = torch.tensor(np.concatenate([prompt, answer], axis=1))
    expected = processor(both, torch.tensor(logits)).numpy()
    counts = np.stack([np.bincount(row, minlength=VOCABULARY) for row in answer])
    expected = expected - presence[:, None] * (counts > 0) - frequency[:, None] * counts
    sampling = [
        Sampling(repetition_penalty=penalty, presence_penalty=p, frequency_penalty=f)
        for p, f in zip(presence.tolist(), frequency.tolist(), strict=True)
    ]
    seen = np.stack([np.bincount(row, minlength=VOCABULARY) > 0 for row in prompt])
    history = History(jnp.asarray(seen), jnp.asarray(counts, jnp.int32))
    settings = jax.device_put(settings_of(sampling))
    changed = penalised(jnp.asarray(logits), settings, history)
    np.testing.assert_allclose(changed, expected, rtol=1e-6, atol=1e-6)
    drawn = sample(jnp.asarray(logits), settings, jnp.zeros(BATCH), history)
    np.testing.assert_array_equal(drawn, expected.argmax(axis=1))


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("settings", [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.3}])
def test_candidates_are_those_of_transformers(settings, on_cpu, monkeypatch):
    torch = pytest.importorskip("torch")
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    logits = np.random.default_rng(2).normal(size=(BATCH, 512)).astype(np.float32)
    ((name, value),) = settings.items()
    expected = warpers[name](value)(None, torch.tensor(logits)).numpy() > -np.inf
    scaled = jnp.asarray(logits - logits.max(axis=1, keepdims=True))
    equal = jax.device_put(settings_of([Sampling(temperature=1.0, **settings)] * BATCH))
    if not on_cpu:
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda *x, default, **cpu: default(*x))
    np.testing.assert_array_equal(candidates(scaled, equal), expected)


@given(LOGITS, arrays(bool, (BATCH, VOCABULARY)))
def test_only_allowed_tokens_are_left(logits, allowed):
    allowed[0], allowed[:, 3] = True, True
    bits = np.full((BATCH, 32), False)
    bits[:, :VOCABULARY] = allowed
    bits[0] = True  # no limit
    packed = np.packbits(bits, bitorder="little").view(np.int32).reshape(BATCH, 1)
    best = np.array([5, 5, 5], np.int32)
    left, likeliest = jax.jit(limited)(logits, best, packed)
    expected = np.where(allowed, logits, -np.inf)
    np.testing.assert_array_equal(left, expected)
    assert list(likeliest) == [5, *expected.argmax(axis=1)[1:]]


NAN = float("nan")
WRONG: dict[str, list[Any]] = {"temperature": [-0.1, NAN, float("inf")], "top_k": [-1]}
WRONG |= {"top_p": [0.0, 1.5, NAN], "min_p": [1.1], "repetition_penalty": [0.0]}
WRONG |= {"presence_penalty": [2.5], "frequency_penalty": [NAN], "seed": [-1, 2**32]}


@pytest.mark.parametrize("option, value", [(n, x) for n, values in WRONG.items() for x in values])
def test_invalid_settings_are_refused_by_name(option, value):
    refuses(option, Sampling, **{option: value})
