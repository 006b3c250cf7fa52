"""Retrieval: needles in texts, and greedy answers."""

import dataclasses
import itertools
import json
import re
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from runtime import SPARSE, engine, numbers, random_model, with_ends

from infinigen_jax import Full, evaluate
from infinigen_jax.evaluation.answers import answer
from infinigen_jax.evaluation.retrieval import (
    GRASS,
    Item,
    chat_frame,
    encoder,
    make_item,
    sentences,
    with_scores,
)
from infinigen_jax.evaluation.session import Measurement

FILLER = sentences(GRASS)


def words(text: str) -> int:
    return len(text.split())


def made(
    length: int, number: int = 0, *, depth: float = 0.5, seed: int = 7, frame=("", "")
) -> Item:
    return make_item(number, seed, depth, length, FILLER, words, frame)


def test_items_have_their_answers_at_their_depth_and_fill_their_length():
    for length, depth, number in itertools.product([150, 400], [0.0, 0.5, 1.0], range(2)):
        item = made(length, number, depth=depth)
        used = words(item.context + item.question)
        assert item.length - 60 < used <= item.length - 8
        assert item.context.count(item.answer) == 1 and item.answer not in item.question
        place = item.context.index(item.answer) / len(item.context)
        assert place == pytest.approx(item.depth, abs=0.25)


def test_items_depend_on_seed_and_number_only():
    first, again, other = ([made(150, i, seed=seed) for i in range(2)] for seed in (1, 1, 2))
    assert first == again
    assert len({item.answer for item in [*first, *other]}) == 4
    assert made(300, seed=1).answer == first[0].answer


def test_pairs_have_one_answer():
    """Only the word distinguishes the number from the others."""
    item = make_item(0, 7, 0.5, 400, None, words)
    fact = r"One of the facts: the special magic number for (\w+) is (\d+)\."
    facts = re.findall(fact, item.context)
    assert len(facts) > 20 and len(dict(facts)) == len(facts)
    (word,) = re.findall(r"number for (\w+) mentioned", item.question)
    assert facts[round((len(facts) - 1) / 2)] == (word, item.answer)


class Chat:
    """Tokenizer with a chat template, of one token per character."""

    chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}>"
    special_tokens: ClassVar = {"bos_token": "B"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, "B" * add_special_tokens + text))


def test_a_chat_template_encloses_text_and_question_and_brings_its_special_tokens():
    frame = chat_frame(Chat())
    assert frame == ("B[", "]>")
    item = made(150, frame=frame)
    assert item.context.startswith("B[A special magic number") and "]>" not in item.context
    assert re.fullmatch(r"\nWhat is .* text\?\]>The .* is", item.question)
    assert encoder(Chat(), frame)("B[a") == list(map(ord, "B[a"))
    assert encoder(Chat(), ("", ""))("a") == list(map(ord, "Ba"))


PROMPTS = [numbers(n) for n in (37, 22, 31)]


def test_answers_are_those_of_generate():
    """With the full cache, prefill and decode steps compute the same."""
    expected = engine("one", Full()).generate(PROMPTS, max_new_tokens=6).tokens
    tokens, traffic = answer(engine("one", Full()), PROMPTS, 9, 6, 2)
    assert tokens.dtype == np.int32 and tokens.tolist() == expected
    assert traffic.tokens == 3 * (9 + 5)

    sparse, _ = answer(engine("one", SPARSE), PROMPTS, 9, 6, 2)
    assert sparse.tolist() != expected


def test_answers_end_with_the_text():
    chosen = engine("one", Full())
    tokens, _ = answer(chosen, PROMPTS, 9, 6, 2)
    third = int(tokens[0, 2])
    first = tokens[0].tolist().index(third)
    tokens, _ = answer(with_ends(chosen, third), PROMPTS, 9, 6, 2)
    assert (tokens[0, first:] == -1).all() and (tokens[0, :first] >= 0).all()


def scored(items: list[Item], *answers: np.ndarray) -> list[dict[str, Any]]:
    """Return the lines of some configurations' answers, the first one the reference."""
    tokenizer = SimpleNamespace(decode=lambda tokens: " ".join(map(str, tokens)))
    model = dataclasses.replace(random_model("one"), given_tokenizer=tokenizer)
    described: dict[str, Any] = {"policy": "p", "settings": {}}
    measured = [
        Measurement({"answers": one}, described | {"reference": i == 0})
        for i, one in enumerate(answers)
    ]
    return with_scores(measured, items, model)


def test_means_by_length_and_depth():
    places = ((10, 0.0, 64), (11, 1.0, 64), (12, 1.0, 99))
    items = [Item("", "", str(answer), depth, length, 0) for answer, depth, length in places]
    full = np.array([[10, 5], [11, -1], [12, 13]], np.int32)
    sparse = np.array([[10, 5], [90, -1], [12, 14]], np.int32)
    first, second = scored(items, full, sparse)
    assert first["accuracy"] == 1 and first["same"] is None and second["items"] == 3
    assert second["accuracy"] == pytest.approx(2 / 3) and second["same"] == pytest.approx(1 / 3)
    cells = [(c["length"], c["depth"], c["accuracy"]) for c in second["cells"]]
    assert cells == [(64, 0, 1), (64, 1, 0), (99, 1, 1)]


def test_a_needle_at_several_depths_is_one_for_the_error():
    right = np.array([[1, 1, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1]])  # needles, depths
    items = [Item("", "", "7", depth / 3, 64, number) for depth in range(4) for number in range(3)]
    (found,) = scored(items, np.where(right.T.reshape(-1, 1) == 1, 7, 5).astype(np.int32))
    means = right.mean(axis=1)
    assert found["accuracy"] == pytest.approx(right.mean())
    assert found["accuracy_standard_error"] == pytest.approx(means.std(ddof=1) / np.sqrt(3))
    assert found["items"] == 12


@pytest.mark.slow
def test_the_embedded_model_looks_things_up(tmp_path, capsys):
    """With only sinks and recent tokens resident, it misses the numbers that are not fetched."""
    result = tmp_path / "r.json"
    arguments = ["retrieval", "--length", "200", "300", "--depth", "0.3", "0.8", "--quiet"]
    arguments += ["--items", "1", "--batch", "2", "--dense-layers", "0", "--budget", "0.05"]
    arguments += ["--policy", "infinigen:window=32", "window:window=32", "--json", str(result)]
    assert evaluate.main(arguments) == 0
    found = json.loads(result.read_text())["configurations"]
    assert [c["policy"] for c in found] == ["full", "infinigen", "window"]
    assert [c["accuracy"] for c in found[:2]] == [1, 1] and found[2]["accuracy"] < 1
    cells = [(200, 0.3, 1), (200, 0.8, 1), (300, 0.3, 1), (300, 0.8, 1)]
    assert [(c["length"], c["depth"], c["items"]) for c in found[0]["cells"]] == cells
