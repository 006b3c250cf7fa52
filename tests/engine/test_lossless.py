"""Lossless mode: the tokens are those of policy full, whatever the policy drafts."""

import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import numpy as np
import pytest
from runtime import (
    ALL,
    NEW,
    RAGGED,
    SPARSE,
    TAILED,
    engine,
    random_model,
    slow_except,
    tokens_of,
    with_ends,
)

from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.live_batch import LiveBatch
from infinigen_jax.engine.lossless import LosslessRun, LosslessStats
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import load
from infinigen_jax.policies import H2O, Full, InfiniGen, Oracle, PreviousQuery, Quest, Window
from infinigen_jax.settings.pool import Pool
from infinigen_jax.settings.sampling import Sampling

FULL = Full(window=4, sinks=2)  # rows are stored for the host when those of SPARSE are
LONGER = 3 * NEW
POOR = dataclasses.replace(SPARSE, budget=0.02)  # drafts that are often rejected
HOT = Sampling(temperature=1.0, top_k=30, seed=4)
PENALISED = Sampling(temperature=0.7, frequency_penalty=1.5, repetition_penalty=1.3, seed=9)
# Model, policy and settings of both engines; then of the lossless one alone.
# Undo of hot sets, states and windows is in test_undo.py.
CASES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "infinigen": ("one", SPARSE, {}, {}),
    "poor": ("gqa", POOR, {}, {"draft_tokens": 4}),
    "tail": ("gqa", TAILED, {}, {"draft_tokens": 2}),
    "own-query": ("gqa", dataclasses.replace(POOR, query="own", tail=True), {}, {}),
    "hot-set": ("gqa", POOR, {}, {"hot_set": 1.5, "draft_tokens": 4}),
    "window": ("one", Window(budget=0.1, window=4, sinks=2), {}, {"draft_tokens": 3}),
    "quest": ("one", Quest(budget=0.1, window=4, sinks=2), {}, {"draft_tokens": 3}),
    "h2o": ("one", H2O(budget=0.1, window=4, sinks=2), {}, {"draft_tokens": 3}),
    "previous-query": ("one", PreviousQuery(budget=0.1, window=4, sinks=2), {}, {}),
    "oracle": ("one", Oracle(budget=0.05, window=4, sinks=2), {}, {"draft_tokens": 4}),
    "int8": ("one", POOR, {"rows": "int8"}, {"draft_tokens": 3}),
    "int4": ("one", POOR, {"rows": "int4"}, {"draft_tokens": 2}),
    "weights": ("gqa", POOR, {"weights": "host"}, {"draft_tokens": 4}),
    "small-weights": ("gqa", POOR, {}, {"draft_tokens": 4, "draft_weights": "int4"}),
    "small-opt": ("opt", POOR, {"weights": "host"}, {"draft_weights": "bfloat16"}),
    "layerwise": ("gqa", POOR, {"schedule": "layerwise"}, {}),
    "windows": ("windows", POOR, {}, {"draft_tokens": 4}),
    "opt": ("opt", POOR, {"dense_layers": 0}, {"draft_tokens": 4}),
    "softcap": ("gemma2", POOR, {}, {"draft_tokens": 4}),
    "check": ("one", POOR, {}, {"check": True, "draft_tokens": 4}),
}


@functools.cache
def pair(name: str) -> tuple[Engine, Engine]:
    """The engine with the full cache, and the lossless one."""
    model, policy, common, lossless = CASES[name]
    return engine(model, FULL, **common), engine(model, policy, lossless=True, **common, **lossless)


def stats_of(made: Engine, *arguments: Any, **settings: Any) -> tuple[Any, LosslessStats]:
    generation = made.generate(*arguments, ignore_eos=True, **settings)
    assert isinstance(generation.stats, LosslessStats)
    return generation, generation.stats


@pytest.mark.parametrize("name", slow_except(CASES, "infinigen", "poor", "int8", "weights"))
def test_the_tokens_are_those_of_the_full_cache(name):
    """Nothing is compiled late, also where a prompt waits for another one to end."""
    full, lossless = pair(name)
    batch = 2 if name == "int8" else None
    generation, stats = stats_of(lossless, RAGGED, None, LONGER, batch=batch)
    assert generation.tokens == tokens_of(full, RAGGED, LONGER, ignore_eos=True)
    assert stats.compilations_after_warmup == 0
    assert 1 <= stats.tokens_per_verification <= 1 + stats.draft_tokens


def test_draws_are_those_of_the_full_cache_with_the_same_seed():
    full, lossless = pair("poor")
    given = RAGGED, [Sampling(), HOT, PENALISED], LONGER
    generation, stats = stats_of(lossless, *given)
    assert generation.tokens == full.generate(*given, ignore_eos=True).tokens
    assert 0 < stats.acceptance_rate < 1  # or nothing was tested


def test_a_perfect_draft_is_accepted_whole():
    made = engine("one", ALL, lossless=True, draft_tokens=3)
    _, stats = stats_of(made, RAGGED, None, 1 + 3 * 4)
    assert (stats.acceptance_rate, stats.tokens_per_verification) == (1.0, 4.0)
    assert stats.draft_tokens == 3


def test_an_ending_token_ends_the_answer_within_a_round():
    """The tokens after it were drafted and agree; they are neither returned nor cached."""
    engines = pair("infinigen")
    answer = tokens_of(engines[0], RAGGED, LONGER, ignore_eos=True)[0]
    end = next(i for i, token in enumerate(answer[4:], 4) if answer.index(token) == i)
    expected, tokens = (tokens_of(with_ends(x, answer[end]), RAGGED, LONGER) for x in engines)
    assert tokens == expected
    assert tokens[0] == answer[: end + 1]


def test_a_shared_prefix_changes_nothing():
    given: dict[str, Any] = {"prefix": RAGGED[0], "ignore_eos": True}
    expected, found = (made.generate(RAGGED, None, NEW, **given) for made in pair("poor"))
    assert found.tokens == expected.tokens
    assert found.stats.prompt_tokens_read == expected.stats.prompt_tokens_read


@pytest.mark.parametrize("name", slow_except(("poor", "int8", "h2o", "hot-set"), "int8"))
def test_a_conversation_may_end_a_turn_at_any_token(name):
    """The context then holds the tokens that were yielded, and the next turn follows them."""
    engines = pair(name)
    turns = [*RAGGED, RAGGED[0][:9]]

    def talk(made: Engine) -> list[Any]:
        talk, answers = made.conversation(context=200), []
        for turn, stop in zip(turns, (5, 1, 12, 40), strict=True):
            answer: list[Any] = []
            with contextlib.closing(talk.turn(turn, 30, ignore_eos=True)) as steps:
                for step in itertools.islice(steps, stop):
                    answer += step.tokens
            answers.append(answer)
            assert talk.tokens[-len(answer) :] == answer
            assert len(talk.tokens) - 1 <= talk.cached <= len(talk.tokens)
        return answers

    assert talk(engines[1]) == talk(engines[0])


@pytest.mark.usefixtures("shallow")
def test_a_stop_string_within_a_round_ends_a_turn():
    """The context holds the tokens up to it, once each."""
    made = Engine(load("tiny-llama"), policy=ALL, lossless=True, draft_tokens=3)
    prompt, talk = "Once upon a time", made.conversation(context=200)
    tokens = [token for step in talk.turn(prompt, 9, ignore_eos=True) for token in step.tokens]
    decode, begin = made.model.tokenizer.decode, len(made.encode(prompt))
    stop = decode(tokens[:6])[-2:]  # two rounds of four tokens follow the first token
    count = next(n for n in range(1, 10) if stop in decode(tokens[:n]))
    talk.reset()
    for _ in talk.turn(prompt, 9, ignore_eos=True, stop=[stop]):
        pass
    assert (count - 1) % 4, "the string ends a round"
    assert talk.tokens[begin:] == tokens[:count]


LOSSLESS = {"lossless": True}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (LOSSLESS | {"policy": Full()}, "lossless: policy full"),
        (LOSSLESS | {"pool": Pool(tokens=40)}, "pool"),
        (LOSSLESS | {"rows": "int8", "policy": InfiniGen(window=1)}, "lossless: `rows` int8"),
        ({"draft_tokens": 3}, "draft_tokens: nothing is drafted"),
        ({"draft_weights": "int4"}, "draft_weights: nothing is drafted"),
    ],
)
def test_settings_that_rule_it_out_are_named(settings, named):
    with pytest.raises(InputError, match=named):
        Engine(random_model("one"), **({"policy": SPARSE, "dense_layers": 0} | settings))


def test_small_weights_are_not_made_smaller():
    model = load("tiny-llama", weight_dtype="int8")
    with pytest.raises(InputError, match="draft_weights: the model's weights are small"):
        Engine(model, policy=SPARSE, lossless=True, draft_weights="int4")


def test_a_batch_that_sequences_join_and_given_tokens_are_refused():
    made = pair("poor")[1]
    with pytest.raises(InputError, match="lossless"):
        LiveBatch.empty(made.runtime, 2, 128)
    run = made.start(RAGGED, max_new_tokens=2)
    assert isinstance(run, LosslessRun)
    for use in (run.advance, lambda: run.predict(np.zeros(3, np.int32))):
        with pytest.raises(InputError, match="lossless"):
            use()
