"""The text of a command line's prompts that reaches the model."""

import argparse
import dataclasses

import pytest
from runtime import random_model
from tiny import refuses

from infinigen_jax.cli.prompts import ANSWER_TOKENS, NEW_TOKENS, prepare_prompts
from infinigen_jax.engine.engine import Engine
from infinigen_jax.loading.load import Model, embedded
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
    model = random_model("one")
    config = dataclasses.replace(model.config, max_positions=200, vocab_size=10**6)
    templated = Tokenizer(tokenizer.backend, tokenizer.special_tokens, template)
    model = dataclasses.replace(model, config=config, given_tokenizer=templated)
    engine = engine_of(model)
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
    config = dataclasses.replace(model.config, vocab_size=10**6)
    model = dataclasses.replace(model, config=config, given_tokenizer=templated)
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
    for given in (prepared(tokenizer, None), prepared(tokenizer, TEMPLATE, raw=True)):
        settings = {"max_new_tokens": NEW_TOKENS, "prefix": 0, "continues": True}
        assert given == {"prompts": expected} | settings
    refuses("system: no chat template", prepared, tokenizer, None, system="Be brief.")


def test_tokens_that_end_a_turn(tokenizer):
    assert tokenizer.end_ids == [tokenizer.eos_token_id]
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["<|im_end|>"])
    chatting = Tokenizer(backend, tokenizer.special_tokens)
    assert chatting.end_ids == [tokenizer.eos_token_id, backend.token_to_id("<|im_end|>")]
