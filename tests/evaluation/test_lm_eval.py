"""Likelihoods computed by the engine, and the adapter for the lm-evaluation-harness."""

import dataclasses
import importlib.util
from typing import Any, NamedTuple

import numpy as np
import pytest
from runtime import SPARSE, engine, long_rope, numbers, random_model
from tiny import log_probs_of, refuses
from transformers import AutoTokenizer

from infinigen_jax import Engine, Full, embedded, load
from infinigen_jax.evaluation.answers import Continuation, likelihoods
from infinigen_jax.evaluation.texts import beginning, prefixed, split_context

pytestmark = pytest.mark.usefixtures("shallow")


def plain(model: Any, context: Any, text: Any) -> np.ndarray:
    """Return log-probabilities of the plain forward pass for the text's tokens and one more."""
    row = np.zeros((1, 256), np.int32)  # one shape, one compilation; the padding has no effect
    row[0, : len(context) + len(text)] = [*context, *text]
    return log_probs_of(model, row)[0, len(context) - 1 : len(context) + len(text)]


def expected(model: Any, one: Continuation) -> tuple[float, bool]:
    """Return likelihood and greediness by the plain forward pass."""
    log_probs, text = plain(model, one.context, one.text)[:-1], np.array(one.text)
    greedy = bool((log_probs.argmax(axis=-1) == text).all())
    return log_probs[np.arange(len(text)), text].sum(), greedy


def test_likelihoods_are_those_of_the_plain_forward_pass():
    model = random_model("one")
    asked = [Continuation(numbers(n), numbers(m)) for n, m in ((9, 3), (30, 5), (1, 4), (1, 1))]
    # One that is greedy, after a single token and after several.
    best = [int(plain(model, one.context, [])[-1].argmax()) for one in asked[:3]]
    asked += [Continuation(one.context, [token]) for one, token in zip(asked, best, strict=False)]
    done: list[int] = []
    scores, traffic = likelihoods(engine("one", Full()), asked, 3, done.append)
    for (score, greedy), one in zip(scores, asked, strict=True):
        value, likeliest = expected(model, one)
        assert score == pytest.approx(value, abs=1e-3) and bool(greedy) == likeliest
    assert scores[4:, 1].tolist() == [1, 1, 1]
    assert sum(done) == len(asked) and traffic.tokens > 0
    assert likelihoods(engine("one", Full()), [], 3)[0].shape == (0, 2)
    sparse, _ = likelihoods(engine("one", SPARSE), asked, 3)
    assert not np.allclose(sparse[1], scores[1])


def test_contexts_that_are_too_long_lose_their_beginning():
    model = random_model("one")
    context, text = numbers(280), numbers(6)
    scores, _ = likelihoods(engine("one", Full()), [Continuation(context, text)], 1)
    value, _ = expected(model, Continuation(context[-250:], text))
    assert scores[0, 0] == pytest.approx(value, abs=1e-3)
    long, made = [Continuation([3], numbers(256))], engine("one", Full())
    refuses("has 256 tokens, and the model 256 positions", likelihoods, made, long, 1)


def test_texts_whose_keys_would_rotate_differently():
    """A short context makes room for the text; a long one is kept, in a batch of its own."""
    made = Engine(long_rope("one", 32), policy=Full())
    short, long = Continuation(numbers(30), numbers(6)), Continuation(numbers(50), numbers(6))
    scores, _ = likelihoods(made, [short, long], 2)
    cut = Continuation(short.context[-26:], short.text)
    assert scores[0, 0] == pytest.approx(expected(random_model("one"), cut)[0], abs=1e-3)
    alone, _ = likelihoods(made, [long], 1)
    assert scores[1, 0] == pytest.approx(alone[0, 0], abs=1e-3)
    longer = [Continuation(numbers(1), numbers(34))]
    refuses("has 34 tokens, and the model 32 positions", likelihoods, made, longer, 1)


def test_contexts_and_texts_are_told_apart():
    tokenizer = AutoTokenizer.from_pretrained(str(embedded()))
    for context, text in (("The cat sat on", " the mat."), ("The cat ", "sat"), ("A", "b")):
        head, tail = split_context(tokenizer, context, text, 7)
        assert head + tail == prefixed(tokenizer, context + text)
        assert head and tail and tokenizer.decode(tail).endswith(text.strip())
        assert head[0] == tokenizer.encode("a")[0]  # the mark in front
    assert prefixed(tokenizer, "") == tokenizer.encode("")
    assert split_context(tokenizer, "", "A word.", 7) == (
        tokenizer.encode(""),
        tokenizer.encode("A word.", add_special_tokens=False),
    )
    for context in ("", "A cat"):
        refuses("nothing to score", split_context, tokenizer, context, "", 7)


def test_without_a_mark_in_front_a_text_is_behind_the_one_that_ends_texts():
    """Qwen has no such mark: all of its tokens are scored."""
    whole = AutoTokenizer.from_pretrained(str(embedded()))

    class Bare:
        bos_token_id, eos_token_id = None, 2

        @staticmethod
        def encode(text: str, **_: Any) -> list[int]:
            return whole.encode(text, add_special_tokens=False)

    config = dataclasses.replace(random_model("one").config, bos_id=None)
    first = beginning(Bare, config)
    assert first == 2
    for context, text in (("", "yes"), ("  ", "yes, it is"), ("", " ")):
        head, tail = split_context(Bare, context, text, first)
        assert head == [2] and tail == Bare.encode(context + text)
    assert split_context(Bare, "A", " b", first)[0] == Bare.encode("A")


class Request(NamedTuple):
    args: tuple[Any, ...]


@pytest.mark.filterwarnings("ignore")  # the harness's own, and its packages'
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_the_harness():
    from infinigen_jax.evaluation.lm_eval import InfiniGenLM

    refuses("^--budget 7: ", InfiniGenLM, budget=7)
    model = load(embedded())
    tokenizer = model.tokenizer
    lm: Any = InfiniGenLM(Engine(model, policy=Full()), batch_size=2)
    pairs = [("The old man", " went home."), ("", "A word.")]
    found = lm.loglikelihood([Request(pair) for pair in pairs], disable_tqdm=True)
    head, tail = split_context(tokenizer, *pairs[0], first=0)
    assert found[0][0] == pytest.approx(expected(model, Continuation(head, tail))[0], abs=1e-3)
    (total,) = lm.loglikelihood_rolling([Request(("A word.",))], disable_tqdm=True)
    assert found[1][0] == pytest.approx(total, abs=1e-3)
    nulls = {"until": None, "max_gen_toks": None}
    asked = [Request(("Once upon a", {"until": ["a"], "max_gen_toks": 8})), Request(("It", nulls))]
    lm.growing = 64
    first, second = lm.generate_until(asked, disable_tqdm=True)
    texts = Engine(model, policy=Full()).generate(["Once upon a", "It"], max_new_tokens=32).texts
    short = Engine(model, policy=Full()).generate(["Once upon a"], max_new_tokens=8).texts[0]
    assert first == short.split("a")[0] and second == texts[1]
    (behind_nothing,) = lm.generate_until([Request(("", {"max_gen_toks": 4}))], disable_tqdm=True)
    assert behind_nothing
    for sampling in ({"do_sample": True}, {"do_sample": True, "temperature": None}):
        refuses("do_sample", lm.generate_until, [Request(("It", sampling))], True)
    for name in ("quest", "infinigen_jax.policies.quest:Quest"):
        made: Any = InfiniGenLM(policy=name, page=8, budget=0.2, device="cpu", batch_size="auto")
        policy = made.engine.decoder.policy
        assert (policy.budget, policy.page, made.batch) == (0.2, 8, 8)
