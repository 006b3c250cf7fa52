"""Prompts in chunks decode like prompts in one piece; test_conversation.py has later turns."""

import dataclasses

import numpy as np
import pytest
import runtime
from runtime import engine, numbers, random_model, slow_except, tokens_of

from infinigen_jax import generate
from infinigen_jax.cache.layers import Resident
from infinigen_jax.engine.engine import Engine
from infinigen_jax.policies import H2O, Full, InfiniGenPaper, Oracle, Policy, PreviousQuery, Quest
from infinigen_jax.prefill import layer as prompt_layer
from infinigen_jax.prefill.prefill import chunk_length
from infinigen_jax.programs.compilations import compilations

# Policies of no other test: programs are shared by policy, and these have small blocks.
SPARSE = dataclasses.replace(runtime.SPARSE, sinks=3)
LONG = [numbers(n) for n in (150, 40, 97)]
POLICIES: dict[str, Policy] = {
    "infinigen": dataclasses.replace(SPARSE, tail=True, index_dtype="int4", partial_ratio=1.0),
    "paper": InfiniGenPaper(sinks=3),
    "full": Full(window=6),
    "h2o": H2O(window=4, sinks=3, budget=0.2),
    "quest": Quest(window=4, sinks=3, budget=0.3),
    "previous-query": PreviousQuery(window=4, sinks=3, budget=0.2),
    "oracle": Oracle(window=4, sinks=3, budget=0.2),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks before a chunk."""
    monkeypatch.setattr(prompt_layer, "BLOCK", 48)


@pytest.mark.parametrize("name", slow_except(POLICIES, "infinigen"))
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


def test_small_rows_are_scaled_by_the_first_chunk():
    chunked, at_once = (engine("one", SPARSE, rows="int8", prefill_chunk=n) for n in (64, 256))
    cache, first, whole = (
        made.start(prompts, max_new_tokens=2).cache
        for made, prompts in ((chunked, LONG), (chunked, [p[:64] for p in LONG]), (at_once, LONG))
    )
    for i in (0, 2):
        for of_chunks, of_first in zip(cache.scales, first.scales, strict=True):
            np.testing.assert_array_equal(of_chunks.scale[i], of_first.scale[i])
    # Later chunks read each layer's rows as stored: near, not equal.
    for x, y in zip(cache.local, whole.local, strict=True):
        assert isinstance(x, Resident) and isinstance(y, Resident)
        error = np.abs(np.asarray(x.rows - y.rows)).mean() / np.abs(np.asarray(y.rows)).mean()
        assert error < 0.05


def test_one_compilation_serves_all_chunks_and_progress_is_told():
    told: list[tuple[int, int]] = []
    policy = dataclasses.replace(SPARSE, window=6)
    chunked = Engine(random_model("one"), policy=policy, dense_layers=0, prefill_chunk=64)

    def start(*prompts: list[int]) -> list[tuple[int, int]]:
        told.clear()
        chunked.start(list(prompts), max_new_tokens=2, notify=lambda *done: told.append(done))
        return told

    assert start(LONG[0]) == [(64, 150), (128, 150), (150, 150)]
    before = compilations()
    assert start(numbers(230))[-1] == (230, 230) and compilations() == before
    assert start(LONG[1]) == []


def test_chunk_lengths():
    assert [chunk_length(n, 1024) for n in (1, 64, 65, 500, 600)] == [64, 64, 128, 512, 640]
    assert [chunk_length(n, 1024) for n in (1024, 1025, 1100, 65536)] == [1024, 640, 640, 1024]
    for tokens in range(1, 9000, 37):
        length = chunk_length(tokens, 1024)
        assert length <= 1024
        assert -(-tokens // length) * length - tokens < length


@pytest.mark.slow
def test_generate_shows_how_far_a_long_prompt_is_read(command):
    arguments = ("--prompt", "one two three four " * 20, "--max-new-tokens", 1)
    whole = command(generate.main, *arguments, "--quiet")
    chunked = command(generate.main, *arguments, "--prefill-chunk", 64)
    assert chunked[:2] == whole[:2] and whole[2] == ""
    assert "prompt: 100%" in chunked[2] and "first token after" in chunked[2]
