"""Retrieval: generated problems, files of Lost in the Middle, and greedy answers."""

import dataclasses
import gzip
import json
from typing import Any

import numpy as np
import pytest
from runtime import ALL, SPARSE, engine, random_model
from tiny import only

from infinigen_jax import evaluate
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.answers import answer
from infinigen_jax.evaluation.haystacks import (
    GRASS,
    TASKS,
    Item,
    generate,
    make_items,
    sentences,
)
from infinigen_jax.evaluation.lost_in_the_middle import read_items, read_lines
from infinigen_jax.evaluation.parts import Measurement
from infinigen_jax.evaluation.retrieval import normalised, score, with_scores
from infinigen_jax.evaluation.session import Line
from infinigen_jax.loading.load import embedded
from infinigen_jax.policies import Full

FILLER = sentences(GRASS)


def words(text: str) -> int:
    return len(text.split())


# Problems.


def test_items_have_their_answers_at_their_depth_and_fill_their_length():
    depths = [0.0, 0.5, 1.0]
    items = make_items(list(TASKS), [150, 400], depths, 2, 7, FILLER, words)
    assert len(items) == 2 * 2 * (3 + 3 + 1 + 1)
    for item in items:
        used = words(item.context + item.question)
        assert item.length - 60 < used <= item.length - 8
        assert all(answer in item.context for answer in item.answers)
    for item in items:
        if item.task in ("needle", "kv"):
            (answer,) = item.answers
            assert item.context.count(answer) == 1 and answer not in item.question
            place = item.context.index(answer) / len(item.context)
            assert place == pytest.approx(item.depth, abs=0.25)


def test_items_depend_on_seed_and_number_only():
    first, again, other = (
        make_items(["needle", "kv"], [150], [0.5], 2, seed, FILLER, words) for seed in (1, 1, 2)
    )
    assert first == again
    answers = [item.answers for item in [*first, *other]]
    assert len(set(answers)) == len(answers)
    longer = make_items(["needle"], [300], [0.5], 1, 1, FILLER, words)
    assert longer[0].answers == first[0].answers


def test_variables_follow_a_chain():
    context, question, names = generate("variables", 0, 3, None, FILLER)(40)
    value = question.split("value ")[1].split()[0]
    places = [context.index(f"VAR {name} = ") for name in names]
    assert places == sorted(places) and context.count(value) == 1
    for name, source in zip(names[1:], names, strict=False):
        assert f"VAR {name} = VAR {source}." in context
    assert f"VAR {names[0]} = {value}." in context


def test_aggregation_asks_for_the_most_frequent():
    for amount in (0, 30, 400):
        context, _, answers = generate("aggregation", 1, 3, None, FILLER)(amount)
        listed = context.split("\n")[1].split()[1::2]
        counts = {word: listed.count(word) for word in set(listed)}
        top = sorted(counts, key=lambda word: -counts[word])[: len(answers)]
        assert sorted(top) == sorted(answers)


def test_scores():
    def item(task: str, *answers: str) -> Item:
        return Item(task, "c", "q", answers, None, 1, "")

    assert score(item("needle", "1234567"), " 1234567. And") == 1
    assert score(item("needle", "1234567"), " 123456 7") == 0
    assert score(item("variables", "AB", "CD"), "cd, EF") == 0.5
    assert score(item("qa", "The Beatles", "Queen"), "it was beatles!") == 1
    assert normalised("The  cat, a dog.") == "cat dog"


# Files.

PAIRS = [[f"key{i}", f"value{i}"] for i in range(20)]
DOCUMENTS = [
    {"title": f"T{i}", "text": f"Text number {i}.", "isgold": i == 6, "hasanswer": i == 6}
    for i in range(10)
]


def test_lost_in_the_middle(tmp_path):
    path = tmp_path / "kv.jsonl.gz"
    lines = [
        {"ordered_kv_records": PAIRS, "key": f"key{i}", "value": f"value{i}"} for i in (0, 10, 19)
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    items = read_items(str(path), None, 500, words)
    assert [item.depth for item in items] == [0, 10 / 19, 1]
    assert '{"key0": "value0",\n "key1": "value1",' in items[0].context
    assert items[1].question == '\n\nKey: "key10"\nCorresponding value:'
    assert items[1].answers == ("value10",) and items[1].context.count('": "') == 20
    said: list[str] = []
    short = read_items(str(path), 2, 45, words, said.append)
    assert len(said) == 1 and "--length 45" in said[0]
    assert len(short) == 2 and "value0" in short[0].context
    assert 3 < short[0].context.count('": "') < 19
    with pytest.raises(InputError, match="--length 20: too short"):
        read_items(str(path), None, 20, words)

    path = tmp_path / "qa.jsonl"
    line = {"question": "which?", "answers": ["number 6"], "ctxs": DOCUMENTS}
    path.write_text(json.dumps(line) + "\n\n")
    (item,) = read_items(str(path), None, 500, words)
    assert item.task == "qa" and "Document [7](Title: T6) Text number 6." in item.context
    assert item.question == "\n\nQuestion: which?\nAnswer:"
    (short,) = read_items(str(path), None, 60, words)
    assert "Text number 6." in short.context and "Text number 9." not in short.context


def question(**changes: Any) -> str:
    return json.dumps({"question": "?", "answers": ["A"], "ctxs": DOCUMENTS} | changes)


SOMETHING_ELSE = {
    "empty": "",
    "list": "[1]",
    "half": "{",
    "no documents": '{"question": "?"}',
    "latin": "\x80",
    "other fields": '{"a": 1}',
    "documents that are none": question(ctxs=[3]),
    "a document without a title": question(ctxs=[*DOCUMENTS, {"text": "Text."}]),
    "answers that are letters": question(answers="The Beatles"),
    "answers that are numbers": question(answers=[3]),
    "nothing but an article to find": question(
        answers=["The"], ctxs=[{"title": "T", "text": "x", "isgold": True, "hasanswer": True}]
    ),
    "no answers": question(answers=[]),
    "deep": "[" * 100_000,
}


def test_lines_end_where_json_says(tmp_path):
    """Not at characters within strings, and behind a mark of the byte order, if there is one."""
    path, lines = tmp_path / "a.jsonl", [{"a": "x\u2028y\u0085z"}, {"b": 1}]
    text = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_bytes(text.encode("utf-8-sig"))
    assert read_lines("--data", str(path)) == lines


@pytest.mark.parametrize("content", SOMETHING_ELSE.values(), ids=SOMETHING_ELSE)
def test_files_that_are_something_else(content, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=r"--data .*a\.jsonl"):
        read_items(str(path), None, 500, words)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"no gzip")
    with pytest.raises(InputError, match="--data"):
        read_lines("--data", str(path))


# Answers.

RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(3, 96, n).tolist() for n in (37, 22, 31)]


def test_answers_are_those_of_generate():
    """With the full cache, what prefill and what decode steps compute is the same."""
    expected = engine("one", Full()).generate(PROMPTS, max_new_tokens=6).tokens
    tokens, traffic = answer(engine("one", Full()), PROMPTS, 9, 6, 2)
    assert tokens.dtype == np.int32 and tokens.tolist() == expected
    assert traffic.tokens == 3 * (9 + 5)
    everything, _ = answer(engine("one", ALL), PROMPTS, 9, 6, 2)
    assert everything.tolist() == expected
    sparse, _ = answer(engine("one", SPARSE), PROMPTS, 9, 6, 2)
    assert sparse.tolist() != expected


def test_answers_end_with_the_text():
    model = random_model("one")
    chosen = engine("one", Full())
    tokens, _ = answer(chosen, PROMPTS, 9, 6, 2)
    third = int(tokens[0, 2])
    first = tokens[0].tolist().index(third)
    changed = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_ids=(third,)))
    ending = type(chosen)(changed, policy=Full())
    tokens, _ = answer(ending, PROMPTS, 9, 6, 2)
    assert (tokens[0, first:] == -1).all() and (tokens[0, :first] >= 0).all()


def test_means_by_task_length_and_depth():
    class Tokenizer:
        @staticmethod
        def decode(tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    model = dataclasses.replace(random_model("one"), given_tokenizer=Tokenizer())
    items = [Item("needle", "", "", (str(i),), d, 64, "0") for i, d in ((10, 0.0), (11, 1.0))]
    items += [Item("variables", "", "", ("12", "13"), None, 64, "0")]
    full = np.array([[10, 5], [11, -1], [12, 13]], np.int32)
    sparse = np.array([[10, 5], [90, -1], [12, 14]], np.int32)
    described: dict[str, Any] = {"policy": "p", "settings": {}}
    measured = [
        Line(described | {"reference": i == 0}, Measurement({"answers": answers}, {}))
        for i, answers in enumerate((full, sparse))
    ]
    first, second = with_scores(measured, items, model)
    assert first["accuracy"] == 1 and first["same"] is None
    assert second["accuracy"] == pytest.approx(0.5) and second["same"] == pytest.approx(1 / 3)
    assert [part["accuracy"] for part in second["tasks"]] == [0.5, 0.5]
    assert [(c["depth"], c["accuracy"]) for c in second["cells"]] == [(0, 1), (1, 0), (None, 0.5)]
    assert second["accuracy_standard_error"] == 0 and second["tasks"][0]["items"] == 2


def test_an_item_at_several_depths_is_one_for_the_error():
    class Tokenizer:
        @staticmethod
        def decode(tokens: list[int]) -> str:
            return " ".join(map(str, tokens))

    model = dataclasses.replace(random_model("one"), given_tokenizer=Tokenizer())
    right = np.array([[1, 1, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1]])  # problems, depths
    items = [
        Item("needle", "", "", ("7",), depth / 3, 64, str(number))
        for depth in range(4)
        for number in range(3)
    ]
    answers = np.where(right.T.reshape(-1, 1) == 1, 7, 5).astype(np.int32)
    line = Line({"policy": "p", "settings": {}, "reference": True},
                Measurement({"answers": answers}, {}))  # fmt: skip
    (found,) = with_scores([line], items, model)
    means = right.mean(axis=1)
    assert found["accuracy"] == pytest.approx(right.mean())
    assert found["accuracy_standard_error"] == pytest.approx(means.std(ddof=1) / np.sqrt(3))
    assert found["items"] == 12


# The command.


def test_command(tmp_path, capsys):
    result = tmp_path / "r.json"
    arguments = ["retrieval", "--task", "needle", "--length", "128", "--depth", "0", "1"]
    arguments += [
        "--dense-layers",
        "5",
        "--items",
        "1",
        "--batch",
        "2",
        "--max-new-tokens",
        "3",
        "--quiet",
    ]
    arguments += ["--policy", "window", "--json", str(result), "--model", str(embedded())]
    arguments += ["--quiet"]
    assert evaluate.main(arguments) == 0
    rows = [[c.strip() for c in r.split("|")] for r in capsys.readouterr().out.splitlines()]
    assert rows[0][5:8] == ["needle", "all, %", "same"] and len(rows) == 4
    record = json.loads(result.read_text())
    full, window = record["configurations"]
    assert record["items"] == len(full["texts"]) == 2 and full["fetched_fraction"] == 1
    assert 0 < window["fetched_fraction"] <= 0.1 and 0 <= window["same"] <= 1
    assert only(tmp_path) == ["r.json"]


@pytest.mark.slow
def test_the_embedded_model_looks_things_up(tmp_path, capsys):
    """With nothing but sinks and recent tokens resident: what is not fetched is not found."""
    result = tmp_path / "r.json"
    arguments = ["retrieval", "--task", "needle", "--length", "300", "--depth", "0.3", "--quiet"]
    arguments += ["--items", "2", "--batch", "2", "--dense-layers", "0", "--budget", "0.05"]
    arguments += ["--policy", "infinigen", "window", "--json", str(result)]
    assert evaluate.main(arguments) == 0
    found = json.loads(result.read_text())["configurations"]
    assert [c["policy"] for c in found] == ["full", "infinigen", "window"]
    assert [c["accuracy"] for c in found[:2]] == [1, 1] and found[2]["accuracy"] < 1


def test_bad_values(capsys, tmp_path):
    for bad in (
        ["--task", "hay"],
        ["--length", "8"],
        ["--length", "100000"],
        ["--length", "60"],
        ["--depth", "1.5"],
        ["--items", "0"],
        ["--max-new-tokens", "0"],
        ["--haystack", str(tmp_path / "absent")],
        ["--data", str(tmp_path / "absent.jsonl")],
    ):
        assert evaluate.main(["retrieval", "--quiet", *bad]) == 2
        captured = capsys.readouterr()
        assert bad[0] in captured.err and captured.err.count("\n") == 1 and not captured.out
