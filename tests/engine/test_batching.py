"""Continuous batches: more prompts than sequences give each prompt's result alone."""

import numpy as np
import pytest
from runtime import NEW, SPARSE, engine, finished, numbers, tokens_of, with_ends
from tiny import refuses

from infinigen_jax import Engine, Sampling
from infinigen_jax.engine import memory_plan as planning
from infinigen_jax.engine.prompts import FILLED
from infinigen_jax.engine.sampler import sampling_programs
from infinigen_jax.policies import Full, Quest
from infinigen_jax.programs.compilations import compilations

PROMPTS = [numbers(n) for n in (37, 5, 21, 9, 50, 3, 12)]


def alone(engine: Engine, **settings) -> list[list[int]]:
    return [tokens_of(engine, [prompt], **settings)[0] for prompt in PROMPTS]


def test_more_prompts_than_sequences():
    """They end at different times, and the statistics count the steps of each."""
    made = with_ends(engine("one"), *range(0, 96, 12))
    run = made.start(PROMPTS, max_new_tokens=60, batch=2)
    assert run.cache.lengths.shape == (2,)
    steps = list(run.tokens())
    assert max(sum(token is not None for token in step) for step in steps) == 2
    assert 0 < run.clock.first < run.stats().prefill_seconds  # which has those that joined later
    columns = [[step[i] for step in steps if step[i] is not None] for i in range(7)]
    single = [made.start([prompt], max_new_tokens=60) for prompt in PROMPTS]
    expected = [[step[0] for step in one.tokens()] for one in single]
    assert run.new_tokens == columns == expected
    lengths = np.array([len(tokens) for tokens in expected])
    assert len(set(lengths)) > 3
    stats, of_each = run.stats(), [one.stats() for one in single]
    fractions = [each.selected_fraction for each in of_each]
    assert stats.selected_fraction == pytest.approx(np.average(fractions, weights=lengths - 1))
    assert stats.host_cache_bytes == 2 * of_each[0].host_cache_bytes
    assert (stats.new_tokens, stats.prompt_tokens) == (lengths.sum(), sum(map(len, PROMPTS)))


def test_a_prompt_that_ends_with_its_first_token():
    made = engine("one")
    expected = [tokens[:1] for tokens in alone(made)]
    got = made.generate(PROMPTS, max_new_tokens=1, batch=2)
    assert got.tokens == expected
    assert got.stats.fetched_fraction == 0 and got.stats.new_tokens == len(PROMPTS)
    full = engine("one", Full(window=4))
    prompts = (PROMPTS, 1), (PROMPTS[:1], 2), (PROMPTS[:1] * 3, 2)
    stats = [full.generate(given, max_new_tokens=n, batch=1).stats for given, n in prompts]
    none, single, several = (each.host_to_device_bytes_per_token for each in stats)
    assert none == 0 < single == several
    stopping = with_ends(made, expected[0][0])
    assert tokens_of(stopping, PROMPTS, batch=1) == alone(stopping)


def test_idle_rows_rest():
    """They fetch nothing and never reach the end of the cache, however long others continue."""
    long = [9] * 68
    soon, late = (tokens_of(engine("one"), [prompt], 60)[0] for prompt in (PROMPTS[1], long))
    end = next(i for i in range(3, 60) if soon[i] not in late[:40])  # the others' end
    made = with_ends(engine("one"), soon[end])
    prompts = [PROMPTS[1], PROMPTS[1], long]
    run = made.start(prompts, max_new_tokens=60, batch=2)
    assert run.capacity == 128
    resting = 0
    for _ in run.tokens():
        for sequence in np.flatnonzero(run.idle & ~run.idle.all()):
            resting += 1
            assert run.cached[sequence] == np.asarray(run.cache.lengths)[sequence]
            assert run.cached[sequence] <= max(SPARSE.window, len(PROMPTS[1]) + end + 1) + 1
    assert run.new_tokens == [tokens_of(made, [prompt], 60)[0] for prompt in prompts]
    assert len(run.new_tokens[2]) > 30 < resting
    selected = np.stack([np.asarray(counts.selected) for counts in run.counts])
    assert selected[-20:].any(axis=0).sum() == 1  # one sequence's


def test_sequences_that_end_between_flushes():
    """The second one ends at the full capacity of 128, one step before prompts are admitted."""
    made = engine("one", Quest(budget=0.2, window=4, sinks=2))
    prompts = [numbers(29, seed) for seed in (1, 2, 3)]
    expected = tokens_of(made, prompts, 99, batch=2)  # equally long, so none joins in between
    end = next(i for i in range(2, 60) if expected[0][i] not in expected[1] + expected[2])
    stopping = with_ends(made, expected[0][end])
    run = stopping.start(prompts, max_new_tokens=99, batch=2)
    for _ in run.tokens():
        assert np.array_equal(run.cached, run.cache.lengths)
        assert run.cached.max() <= run.capacity == 128
    assert run.new_tokens == [expected[0][: end + 1], *expected[1:]]


def test_as_many_prompts_together_as_fit(monkeypatch, caplog):
    made = engine("one")
    expected = alone(made)
    two, one = (
        max(plan.total for plan in made.start(PROMPTS, max_new_tokens=1 + NEW, batch=n).phases)
        for n in (2, 1)
    )

    def free(number: float) -> None:
        monkeypatch.setattr(planning, "available_host_bytes", lambda: int(number))

    free(two / FILLED + 1)
    caplog.clear()
    run = made.start(PROMPTS, max_new_tokens=NEW, fit=True)
    assert len(caplog.messages) == 1 and len(run.owner) == 2
    assert "2 of 7 prompts" in caplog.text and "as many as fit" in caplog.text
    assert [*run.tokens()] and run.new_tokens == expected == tokens_of(made, PROMPTS)
    # All prompts, or those asked for.
    said = refuses("`batch`", made.start, PROMPTS, max_new_tokens=NEW)
    assert "the number of prompts" not in said
    refuses("`max_new_tokens`(,| or) `batch`", made.generate, PROMPTS, max_new_tokens=NEW, batch=6)
    caplog.clear()
    free(one - 1)
    refuses("the number of prompts to 1", made.generate, PROMPTS, max_new_tokens=1 + NEW)
    assert caplog.messages == []
    free(1000)
    said = refuses("lower the prompt length", made.generate, PROMPTS[:1], max_new_tokens=NEW)
    assert "`batch`" not in said and "number of prompts" not in said


ASKED = [numbers(n) for n in (12, 7, 20, 9)]
SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0, top_k=40, seed=5),
    Sampling(repetition_penalty=1.5, frequency_penalty=1.0),
    Sampling(temperature=0.8, top_p=0.9, min_p=0.01, presence_penalty=1.0, seed=6),
]


def made():
    return engine("one", SPARSE, 0)


def by_itself(prompt, settings):
    return tokens_of(made(), [prompt], sampling=settings, ignore_eos=True)[0]


def test_each_prompt_has_its_own_settings():
    """Also where it takes the sequence of a prompt with others."""
    expected = [by_itself(*pair) for pair in zip(ASKED, SETTINGS, strict=True)]
    assert len({tuple(by_itself(ASKED[0], settings)) for settings in SETTINGS}) == len(SETTINGS)
    assert tokens_of(made(), ASKED, sampling=SETTINGS, batch=2, ignore_eos=True) == expected


def test_a_change_of_settings_compiles_nothing():
    by_itself(ASKED[0], SETTINGS[1])
    before = compilations()
    for temperature in (0.5, 0.9):
        by_itself(ASKED[0], Sampling(temperature=temperature, top_p=temperature, top_k=3, seed=1))
    assert compilations() == before


@pytest.mark.parametrize("kinds", [(0, 0, 1), (2, 1, 1)])
def test_settings_of_prompts_that_wait_or_end_compile_nothing_late(kinds, monkeypatch):
    """The programs are those of all prompts' settings from the first step."""
    monkeypatch.setattr("infinigen_jax.programs.program.program_folder", lambda: None)
    sampling_programs.cache_clear()
    settings = [SETTINGS[kind] for kind in kinds]
    answer = made().generate(ASKED[:3], settings, NEW, batch=2, ignore_eos=True)
    assert answer.stats.compilations_after_warmup == 0


def test_equal_prompts_draw_differently_and_the_first_as_it_would_alone():
    hot = Sampling(temperature=2.0, seed=3)
    answers = tokens_of(made(), [ASKED[0]] * 2, sampling=hot, ignore_eos=True)
    assert answers[0] == by_itself(ASKED[0], hot)
    assert len(set(map(tuple, answers))) == 2


def test_a_strong_penalty_lets_no_token_come_twice():
    never = Sampling(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=100.0)
    answer = by_itself(ASKED[0], never)
    assert len({*answer, *ASKED[0]}) == len(answer) + len(set(ASKED[0]))


def test_log_probabilities_are_those_of_the_model():
    """With penalties as well, and in every sequence that a prompt may take."""
    run = finished(made(), ASKED, sampling=SETTINGS, batch=2, log_probs=3)
    for prompt, answer, choices in zip(ASKED, run.new_tokens, run.log_probs, strict=True):
        scored = made().start([prompt], max_new_tokens=NEW)
        for token, following, choice in zip(answer, answer[1:], choices[1:], strict=False):
            log_probs = np.asarray(scored.predict(np.array([token])))[0]
            best = np.argsort(-log_probs, kind="stable")[:3]
            assert abs(choice.log_prob - log_probs[following]) < 1e-4
            assert [token for token, _ in choice.top] == list(best)
            np.testing.assert_allclose([x for _, x in choice.top], log_probs[best], atol=1e-4)
