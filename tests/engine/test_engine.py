"""The engine: its settings, and how generations end."""

import dataclasses
from typing import Any

import pytest
from runtime import ALL, NEW, RAGGED, SPARSE, counts_of, engine, finished, tokens_of, with_ends

from infinigen_jax.decode import sparse_attention as host_attention
from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import embedded, load
from infinigen_jax.policies import Full
from infinigen_jax.settings.sampling import Sampling

# Settings, each on a model of one layer, whose rows are on the host.


def test_everything_may_stay_on_the_device():
    """All layers are dense, or the window is longer than the cache: nothing is eligible."""
    full = finished(engine("one", Full())).new_tokens
    run = finished(engine("one", SPARSE, 99))
    assert run.decoder.dense_layers == 1
    assert run.cache.host is None and run.stats().fetched_fraction == 0
    assert run.new_tokens == full
    run = finished(engine("one", dataclasses.replace(SPARSE, window=300)))
    assert counts_of(run).sum() == 0 and run.new_tokens == full


def test_caches_of_several_stream_blocks(monkeypatch):
    full = finished(engine("one", Full()))
    monkeypatch.setattr(host_attention, "STREAM_BLOCK", 32)
    blocks = engine("one", Full(window=3))  # another policy: compiled anew
    assert finished(blocks).new_tokens == full.new_tokens


# Ends.


def test_end_of_text_ends_its_row_and_no_other():
    made = engine("one")
    free = finished(made).new_tokens
    eos = free[1][4]  # what the second prompt's fifth token will be
    stopping = with_ends(made, eos)
    got = stopping.generate(RAGGED, max_new_tokens=NEW)
    for tokens, all_tokens in zip(got.tokens, free, strict=True):
        length = all_tokens.index(eos) + 1 if eos in all_tokens else NEW
        assert tokens == all_tokens[:length]
    assert len(got.tokens[1]) <= 5
    assert got.stats.new_tokens == sum(map(len, got.tokens))
    assert tokens_of(stopping, ignore_eos=True) == free
    steps = list(stopping.stream(RAGGED, max_new_tokens=NEW))
    column = [step.tokens[1] for step in steps]
    assert column[: len(got.tokens[1])] == got.tokens[1]
    assert set(column[len(got.tokens[1]) :]) <= {None}
    single = list(stopping.stream([RAGGED[1]], max_new_tokens=NEW))
    assert len(single) == len(got.tokens[1])


def test_single_tokens_are_prompts():
    assert tokens_of(engine("one", ALL), [[7]]) == tokens_of(engine("one", Full()), [[7]])


# What is refused.


def test_settings_and_prompts_out_of_range():
    made = engine("one")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"dense_layers": -1}, "dense_layers"),
        ({"schedule": "eager"}, "schedule"),
        ({"transfer": "pigeon"}, "transfer"),
        ({"weights": "disk"}, "weights disk"),
        *(({"hot_set": size}, "hot_set") for size in (0.5, -1.0, float("nan"))),
    ]
    for settings, named in wrong:
        with pytest.raises(InputError, match=named):
            Engine(made.model, **settings)
    cases: list[tuple[Any, int, str]] = [
        ([], 4, "prompts"),
        ([[]], 4, "prompts"),
        ([[], [5, 6]], 4, "prompts"),
        ([[96]], 4, "prompts"),
        ([[-1]], 4, "prompts"),
        ([""], 4, "prompts"),
        (["text"], 4, "tokenizer"),
        ([[5]], 0, "max_new_tokens"),
        ([[5] * 250], 7, "250 tokens leaves room for 6"),
    ]
    for prompts, new, named in cases:
        for use in (made.generate, made.start):
            with pytest.raises(InputError, match=named):
                use(prompts, max_new_tokens=new)
    with pytest.raises(InputError, match="prefix"):
        made.start([[5, 6]], prefix=-3)
    assert len(tokens_of(made, [[5] * 250], 6, ignore_eos=True)[0]) == 6


@pytest.mark.usefixtures("shallow")
def test_texts_of_a_stream():
    """They are those of its tokens, up to a stop string that ends one prompt and not the other."""
    model = load(embedded())
    made = Engine(model, policy=Full())
    given = ["The", "When the old man saw"], Sampling(temperature=2.0, seed=1), 20
    whole = made.generate(*given, ignore_eos=True)
    for text, tokens in zip(whole.texts, whole.tokens, strict=True):
        assert text == model.tokenizer.decode(tokens, skip_special_tokens=True)

    def streamed(**options: Any) -> tuple[list[Any], list[str]]:
        steps = list(made.stream(*given, ignore_eos=True, **options))
        return steps, ["".join(step.texts[i] for step in steps) for i in range(2)]

    assert streamed()[1] == whole.texts
    stop = whole.texts[1][10:16]
    assert stop not in whole.texts[0]
    steps, texts = streamed(stop=stop)
    assert texts == [whole.texts[0], whole.texts[1].split(stop)[0]]
    ended = [step.tokens[1] is None for step in steps].index(True)
    assert 1 < ended < 20 and all(step.tokens[1] is None for step in steps[ended:])
