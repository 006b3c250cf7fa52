"""The text of a command line's prompts that reaches the model; messages on stderr."""

import argparse
import dataclasses
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from runtime import random_model, with_config
from tiny import refuses

from infinigen_jax import Engine, Model, embedded, messages
from infinigen_jax.cli.dialogue import rate
from infinigen_jax.generate import ANSWER_TOKENS, NEW_TOKENS, prepare_prompts
from infinigen_jax.messages import Messages
from infinigen_jax.text.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    "[assistant]"
)
PROMPTS = ["The king said", "The sea"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(embedded())


def engine_of(model: Model) -> Engine:
    """Return an engine that encodes with a model whose vocabulary its weights do not have."""
    engine = Engine(random_model("one"))
    engine.runtime = dataclasses.replace(engine.runtime, model=model)
    return engine


def prepared(tokenizer, template, prefix="", **options):
    """Prepare prompts with a model whose tokenizer has this template."""
    model = with_config(random_model("one"), max_positions=200, vocab_size=10**6)
    templated = Tokenizer(tokenizer.backend, tokenizer.special_tokens, template)
    engine = engine_of(dataclasses.replace(model, given_tokenizer=templated))
    given = {"raw": False, "system": None, "chat_template": None, "max_new_tokens": None}
    return prepare_prompts(engine, argparse.Namespace(**given | options), PROMPTS, prefix)


def test_a_template_makes_messages_of_prompts(tokenizer):
    given = prepared(tokenizer, TEMPLATE, system="Be brief.")
    texts = [tokenizer.decode(tokens) for tokens in given["prompts"]]
    assert texts == [f"<s>[system] Be brief.</s>[user] {p}</s>[assistant]" for p in PROMPTS]
    assert all(tokens.count(tokenizer.bos_token_id) == 1 for tokens in given["prompts"])
    fitting = 200 - max(map(len, given["prompts"]))
    assert given["prefix"] == 0 and given["max_new_tokens"] == fitting < ANSWER_TOKENS


def test_a_chat_of_a_library(tokenizer):
    model = dataclasses.replace(random_model("one"), given_tokenizer=None)
    turn = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPTS[0]}]
    refuses("no chat template", engine_of(model).encode_chat, turn)
    templated = Tokenizer(tokenizer.backend, tokenizer.special_tokens, TEMPLATE)
    model = dataclasses.replace(with_config(model, vocab_size=10**6), given_tokenizer=templated)
    expected = prepared(tokenizer, TEMPLATE, system="Be brief.")["prompts"][0]
    assert engine_of(model).encode_chat(turn) == expected


def test_a_prefix_is_within_the_message_and_shared(tokenizer):
    prefix = "Once upon a time there was a king of a far country. "
    given = prepared(tokenizer, TEMPLATE, prefix, max_new_tokens=5)
    first, second = given["prompts"]
    assert tokenizer.decode(first) == f"<s>[user] {prefix}{PROMPTS[0]}</s>[assistant]"
    assert given["prefix"] > 10 and first[: given["prefix"]] == second[: given["prefix"]]
    assert given["max_new_tokens"] == 5


def test_prompts_without_a_template(tokenizer):
    expected = [tokenizer.encode(prompt) for prompt in PROMPTS]
    for template, raw in ((None, False), ("", False), (TEMPLATE, True)):
        given = prepared(tokenizer, template, raw=raw)
        settings = {"max_new_tokens": NEW_TOKENS, "prefix": 0, "continues": True}
        assert given == {"prompts": expected} | settings
    refuses("system: no chat template", prepared, tokenizer, None, system="Be brief.")


def test_tokens_that_end_a_turn(tokenizer):
    assert tokenizer.end_ids == [tokenizer.eos_token_id]
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["<|im_end|>"])
    chatting = Tokenizer(backend, tokenizer.special_tokens)
    assert chatting.end_ids == [tokenizer.eos_token_id, backend.token_to_id("<|im_end|>")]


def test_work_that_takes_long_is_announced(monkeypatch, capsys):
    monkeypatch.setattr(messages, "PATIENCE", 0.01)
    for quiet in (False, True):
        say = Messages(quiet)
        with say.working("loading it"):
            time.sleep(0.2)
        with say.working("something short"):
            pass
        assert list(say.decoding(range(3))) == [0, 1, 2]
        assert capsys.readouterr().err == ("" if quiet else "loading it ...\n")
    for say.quiet, say.kept in ((False, False), (False, True)):
        with say.working(messages.READING):
            time.sleep(0.2)
        assert (messages.KEPT in capsys.readouterr().err) == say.kept


def test_no_message_interrupts_a_line_at_a_terminal(monkeypatch, capsys):
    """The first step is passed on with the second one, which may compile."""
    for terminal in (False, True):
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda terminal=terminal: terminal)
        made: list[int] = []
        steps = Messages().decoding(made.append(i) or i for i in range(3))
        assert next(steps) == 0 and made == ([0, 1] if terminal else [0])
        assert list(steps) == [1, 2]
        assert list(Messages().decoding([5])) == [5] and not list(Messages().decoding([]))


@pytest.mark.parametrize("steps, said", [(2, ""), (3, ", 2.0 tokens/s")])
def test_a_speed_leaves_compilation_out(steps, said):
    """The first decode step compiles, and may be the only one."""
    stats = SimpleNamespace(decode_seconds=0.5, decode_tokens_per_second=2.0)
    run = SimpleNamespace(clock=SimpleNamespace(steps=steps), stats=lambda: stats)
    assert rate(cast(Any, run)) == said
