"""Sampling settings of each sequence in a batch, penalties and log-probabilities."""

import numpy as np
import pytest
from runtime import NEW, SPARSE, engine, finished, numbers, tokens_of

from infinigen_jax.engine.sampler import sampling_programs
from infinigen_jax.programs.compilations import compilations
from infinigen_jax.settings.sampling import Sampling

PROMPTS = [numbers(n) for n in (12, 7, 20, 9)]
SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0, top_k=40, seed=5),
    Sampling(repetition_penalty=1.5, frequency_penalty=1.0),
    Sampling(temperature=0.8, top_p=0.9, min_p=0.01, presence_penalty=1.0, seed=6),
]


def made():
    return engine("one", SPARSE, 0)


def alone(prompt, settings):
    return tokens_of(made(), [prompt], sampling=settings, ignore_eos=True)[0]


def test_each_prompt_has_its_own_settings():
    """Also where it takes the sequence of a prompt with others."""
    expected = [alone(*pair) for pair in zip(PROMPTS, SETTINGS, strict=True)]
    assert len({tuple(alone(PROMPTS[0], settings)) for settings in SETTINGS}) == len(SETTINGS)
    assert tokens_of(made(), PROMPTS, sampling=SETTINGS, batch=2, ignore_eos=True) == expected


def test_a_change_of_settings_compiles_nothing():
    alone(PROMPTS[0], SETTINGS[1])
    before = compilations()
    for temperature in (0.5, 0.9):
        alone(PROMPTS[0], Sampling(temperature=temperature, top_p=temperature, top_k=3, seed=1))
    assert compilations() == before


@pytest.mark.parametrize("kinds", [(0, 0, 1), (2, 1, 1)])
def test_settings_of_prompts_that_wait_or_end_compile_nothing_late(kinds, monkeypatch):
    """The programs are those of all prompts' settings from the first step."""
    monkeypatch.setattr("infinigen_jax.programs.program.program_folder", lambda: None)
    sampling_programs.cache_clear()
    settings = [SETTINGS[kind] for kind in kinds]
    answer = made().generate(PROMPTS[:3], settings, NEW, batch=2, ignore_eos=True)
    assert answer.stats.compilations_after_warmup == 0


def test_equal_prompts_draw_differently_and_the_first_as_it_would_alone():
    hot = Sampling(temperature=2.0, seed=3)
    answers = tokens_of(made(), [PROMPTS[0]] * 2, sampling=hot, ignore_eos=True)
    assert answers[0] == alone(PROMPTS[0], hot)
    assert len(set(map(tuple, answers))) == 2


def test_a_strong_penalty_lets_no_token_come_twice():
    never = Sampling(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=100.0)
    answer = alone(PROMPTS[0], never)
    assert len({*answer, *PROMPTS[0]}) == len(answer) + len(set(PROMPTS[0]))


def test_log_probabilities_are_those_of_the_model():
    """With penalties as well, and in every sequence that a prompt may take."""
    run = finished(made(), PROMPTS, sampling=SETTINGS, batch=2, log_probs=3)
    for prompt, answer, choices in zip(PROMPTS, run.new_tokens, run.log_probs, strict=True):
        scored = made().start([prompt], max_new_tokens=NEW)
        for token, following, choice in zip(answer, answer[1:], choices[1:], strict=False):
            log_probs = np.asarray(scored.predict(np.array([token])))[0]
            best = np.argsort(-log_probs, kind="stable")[:3]
            assert abs(choice.log_prob - log_probs[following]) < 1e-4
            assert [token for token, _ in choice.top] == list(best)
            np.testing.assert_allclose([x for _, x in choice.top], log_probs[best], atol=1e-4)
