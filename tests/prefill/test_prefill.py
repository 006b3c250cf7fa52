"""Prompts in chunks, and caches that get more tokens, equal one long prompt."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
import runtime
from runtime import RAGGED, engine, numbers, padded, random_model, readable, tokens_of

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.layers import Resident
from infinigen_jax.decode.steps import flush_cache, steps
from infinigen_jax.engine.engine import Engine
from infinigen_jax.policies import H2O, Full, InfiniGenPaper, Oracle, Policy, PreviousQuery, Quest
from infinigen_jax.prefill import compiled as prompt_layer
from infinigen_jax.prefill.prefill import chunk_length, extend, prefill
from infinigen_jax.programs.compilations import compilations

# Policies and a capacity of no other test, as programs are shared (those of prompts by capacity
# alone): these have small blocks.
SPARSE, ALL = (dataclasses.replace(policy, sinks=3) for policy in (runtime.SPARSE, runtime.ALL))
LONG = [numbers(n) for n in (150, 40, 97)]
POLICIES: dict[str, Policy] = {
    "infinigen": dataclasses.replace(SPARSE, tail=True, index_dtype="int4", partial_ratio=1.0),
    # The budget limits some of its requests, the mean count the others.
    "paper": InfiniGenPaper(sinks=3, alpha=1.0, streamed_layers=0),
    "full": Full(window=6),
    "h2o": H2O(window=4, sinks=3, budget=0.2),
    "quest": Quest(window=4, sinks=3, budget=0.3),
    "previous-query": PreviousQuery(window=4, sinks=3, budget=0.2),
    "oracle": Oracle(window=4, sinks=3, budget=0.2),
}
CAPACITY = 256


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks before a chunk."""
    monkeypatch.setattr(prompt_layer, "BLOCK", 48)


def read(chosen: Engine, prompts: list[list[int]], chunk: int | None = None) -> tuple[Cache, Any]:
    tokens, lengths = padded(prompts)
    given = chosen.decoder, chosen.runtime.weights, tokens, lengths, CAPACITY
    outcome = prefill(*given, chunk=chunk)
    return outcome.cache, outcome.best


def add(chosen: Engine, cache: Cache, pieces: list[list[int]], chunk: int | None = None):
    tokens, counts = padded(pieces)
    outcome = extend(chosen.decoder, chosen.runtime.weights, cache, tokens, counts, chunk)
    return outcome.cache, outcome.best


def assert_alike(chosen: Engine, got: Cache, expected: Cache) -> None:
    """Compare sums of some hundred products of size 10, through three layers, in another order."""
    for x, y in zip(*(readable(chosen.decoder, cache) for cache in (got, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4)


def test_chunks_fill_the_cache_like_one_piece():
    chosen = engine("gqa", SPARSE, 1)
    whole, first = read(chosen, LONG)
    cache, drawn = read(chosen, LONG, 100)
    assert drawn.tolist() == first.tolist()
    assert_alike(chosen, cache, whole)


@pytest.mark.slow  # the configurations of test_matrix.py have chunks, too
@pytest.mark.parametrize("name", POLICIES)
def test_policies_decode_alike_after_chunks(name):
    chosen = engine("one", POLICIES[name], 0)
    chunked = engine("one", POLICIES[name], 0, prefill_chunk=64)
    assert tokens_of(chunked, LONG) == tokens_of(chosen, LONG)


@pytest.mark.slow
def test_opt_in_chunks():
    """Its table of positions ends before the padding does."""
    chunked = engine("opt", SPARSE, prefill_chunk=64)
    prompts = [[5] * 200, LONG[0]]
    assert tokens_of(chunked, prompts, 56) == tokens_of(engine("opt", SPARSE), prompts, 56)


def test_tokens_appended_after_decoding_equal_one_prompt():
    """Turns of different lengths, one of them empty, after steps between two flushes."""
    chosen = engine("one", ALL)
    turns = [LONG[0][:70], [], LONG[1][:3]]
    run, other = (chosen.start(RAGGED, max_new_tokens=200) for _ in range(2))
    assert run.capacity == CAPACITY
    for _ in range(6):
        run.advance()
    drawn = run.drawn
    # The tokens of the steps, read back from another run.
    made = zip(*itertools.islice(other.tokens(ignore_eos=True), 6), strict=True)
    whole = [[*prompt, *tokens] for prompt, tokens in zip(RAGGED, made, strict=True)]
    assert [len(p) for p in whole] == run.cache.lengths.tolist()
    cache, after = add(chosen, run.cache, turns, 64)
    expected, first = read(chosen, [p + t for p, t in zip(whole, turns, strict=True)])
    assert_alike(chosen, cache, expected)
    assert after.tolist()[::2] == first.tolist()[::2]
    assert cache.lengths.tolist() == expected.lengths.tolist()
    assert drawn is run.drawn
    decoded = decode(chosen, cache, after, 8)
    np.testing.assert_array_equal(decoded[:, ::2], decode(chosen, expected, first, 8)[:, ::2])


def decode(chosen: Engine, cache: Cache, drawn: Any, number: int) -> np.ndarray:
    """Return the tokens of a few steps, with flushes in between."""
    programs, tokens = steps(chosen.decoder), []
    for i in range(number):
        if i and i % chosen.decoder.policy.window == 0:
            cache = flush_cache(chosen.decoder, chosen.runtime.weights, cache)
        tokens.append(np.asarray(drawn))
        parts = cache.parts(chosen.decoder.policy.observes)
        new, _, drawn, _ = programs.fused(chosen.runtime.weights, *parts, drawn)
        cache = cache.stepped(new)
    return np.stack(tokens)


def test_small_rows_are_scaled_by_the_first_chunk():
    chosen = engine("gqa", SPARSE, 0, rows="int8")
    first, _ = read(chosen, [p[:64] for p in LONG])
    cache, _ = read(chosen, LONG, 64)
    whole, _ = read(chosen, LONG)
    longer = [i for i, prompt in enumerate(LONG) if len(prompt) > 64]
    for of_chunks, of_first, of_whole in zip(cache.scales, first.scales, whole.scales, strict=True):
        for i in longer:
            np.testing.assert_array_equal(of_chunks.centre[i], of_first.centre[i])
            np.testing.assert_array_equal(of_chunks.scale[i], of_first.scale[i])
            assert (of_chunks.centre[i] != of_whole.centre[i]).any()
    # Later chunks read each layer's rows as stored: near, not equal.
    for x, y in zip(cache.local, whole.local, strict=True):
        assert isinstance(x, Resident) and isinstance(y, Resident)
        error = np.abs(np.asarray(x.rows - y.rows)).mean() / np.abs(np.asarray(y.rows)).mean()
        assert error < 0.05


def test_one_compilation_serves_all_chunks():
    policy = dataclasses.replace(SPARSE, window=6)
    chosen = Engine(random_model("one"), policy=policy, dense_layers=0)
    read(chosen, [LONG[0][:128]], 64)
    before = compilations()
    cache, _ = read(chosen, [LONG[0] + LONG[1]], 64)
    jax.block_until_ready(cache)
    assert compilations() == before


def test_chunk_lengths():
    assert [chunk_length(n, 1024) for n in (1, 64, 65, 500, 600)] == [64, 64, 128, 512, 640]
    assert [chunk_length(n, 1024) for n in (1024, 1025, 1100, 65536)] == [1024, 640, 640, 1024]
    for tokens in range(1, 9000, 37):
        length = chunk_length(tokens, 1024)
        assert length <= 1024
        assert -(-tokens // length) * length - tokens < length


def test_progress_is_told_chunk_by_chunk():
    told: list[tuple[int, int]] = []
    chunked = Engine(random_model("one"), policy=SPARSE, dense_layers=0, prefill_chunk=64)
    chunked.start(LONG, max_new_tokens=2, notify=lambda *done: told.append(done))
    assert told == [(64, 150), (128, 150), (150, 150)]
    told.clear()
    chunked.start([LONG[1]], max_new_tokens=2, notify=lambda *done: told.append(done))
    assert told == []


@pytest.mark.slow
def test_generate_shows_how_far_a_long_prompt_is_read(command):
    from infinigen_jax import generate

    arguments = ("--prompt", "one two three four " * 20, "--max-new-tokens", 1)
    whole = command(generate.main, *arguments, "--quiet")
    chunked = command(generate.main, *arguments, "--prefill-chunk", 64)
    assert chunked[:2] == whole[:2] and whole[2] == ""
    assert "prompt: 100%" in chunked[2] and "first token after" in chunked[2]
