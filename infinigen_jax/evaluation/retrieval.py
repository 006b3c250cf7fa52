"""Needles in a long text: accuracy of greedy answers for several policies and budgets.

A number is hidden at some depth of a text of any length, as in RULER (COLM 2024). The text is
unrelated, or consists of other numbers, as in a key-value lookup. It is prefilled; question and
answer are decoded, through the model's chat template if it has one. An answer is right if it
contains the number. `same` is the share of answers that equal the full cache's token for token,
which distinguishes policies even if the model finds no needle.
Other tasks: lm-evaluation-harness, with its adapter (`lm_eval`).
"""

import argparse
import bisect
import dataclasses
import functools
import itertools
import random
import re
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from infinigen_jax.errors import ParameterError
from infinigen_jax.evaluation.report import mean_and_error, percent, with_error
from infinigen_jax.evaluation.session import Measurement, Session, add_common_options
from infinigen_jax.evaluation.texts import Text, common_length, prefixed
from infinigen_jax.numeric import Range, whole_number
from infinigen_jax.text.tokenizer import check_vocabulary, render_chat

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.loading.load import Model

DEPTHS = [0.0, 0.25, 0.5, 0.75, 1.0]
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
INTRODUCTION = "A special magic number is hidden within the following text. Memorize it.\n"
SUMMARY = "numbers in a text of any length, at any depth"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    length = "tokens of an item, including the answer (default: the model's positions)"
    add("--length", nargs="+", type=whole_number(16), metavar="N", help=length)
    depths = "depths of the number in the text, 0 to 1 (default 0 0.25 0.5 0.75 1)"
    add("--depth", nargs="+", type=Range(0, 1), default=DEPTHS, metavar="D", help=depths)
    items = "items per length and depth (default 10)"
    add("--items", type=whole_number(1), default=10, metavar="M", help=items)
    add("--haystack", metavar="F", help="text around the numbers (default: about grass and sky)")
    add("--pairs", action="store_true", help="words and other numbers around it: lookups by key")
    add("--raw", action="store_true", help="prompts as they are, without the chat template")
    add("--seed", type=whole_number(0), default=0, help="seed of the items (default 0)")
    add_common_options(parser, batch=8, of="items")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    given = arguments.haystack
    if arguments.pairs and given is not None:
        raise ParameterError("pairs", "not with `haystack`; leave one of them out")
    haystack = None if given is None else Text.read(given, "haystack")
    filler = sentences(GRASS if haystack is None else haystack.content)
    if not filler:
        raise ParameterError("haystack", "no sentences; give some text", given)
    session = Session(arguments, say)
    model = session.load()
    positions = model.config.max_positions
    lengths = arguments.length or [positions]
    if max(lengths) > positions:
        problem = f"the model has {positions} positions; lower it"
        raise ParameterError("length", problem, max(lengths))
    count, depths, seed = arguments.items, arguments.depth, arguments.seed
    frame = ("", "") if arguments.raw else chat_frame(model.tokenizer)
    encode = encoder(model.tokenizer, frame)
    around = None if arguments.pairs else filler
    items = [
        make_item(number, seed, depth, length, around, lambda text: len(encode(text)), frame)
        for length in lengths
        for depth in depths
        for number in range(count)
    ]
    session.record |= {
        "settings": {
            "lengths": lengths,
            "depths": depths,
            "items": count,
            "batch": arguments.batch,
            "seed": seed,
            "chat_template": any(frame),
            "pairs": arguments.pairs,
            "haystack": haystack and {"file": haystack.name, "sha256": haystack.sha256},
        },
        "items": len(items),
    }
    answer_all = functools.partial(measure, items, encode, arguments.batch)
    measured = list(session.measure(model, answer_all, len(items), "items"))
    lines = with_scores(measured, items, model)
    session.finish(lines, ["found, %", "same"], table_cells)


@dataclasses.dataclass(frozen=True)
class Item:
    """A needle in a haystack. Context and question are the prompt."""

    context: str
    question: str
    answer: str
    depth: float  # position of the needle in the context, 0 to 1
    length: int  # tokens that the item was made for, including the answer
    number: int  # of the needle; items with the same one differ only in length and depth


def sentences(text: str) -> list[str]:
    """Split a text into sentences, approximately."""
    return [s for s in re.split("(?<=[.!?]) ", " ".join(text.split())) if s]


def answer_tokens(answer: str, tokens: Callable[[str], int]) -> int:
    """Return the tokens to generate for an answer, with some for surrounding words."""
    return tokens(f" {answer}") + 8


def make_item(
    number: int,
    seed: int,
    depth: float,
    length: int,
    filler: Sequence[str] | None,
    tokens: Callable[[str], int],
    frame: tuple[str, str] = ("", ""),
) -> Item:
    """Return an item with as many sentences as fit.

    Random choices depend only on `seed` and `number`, so a longer item is the shorter one with more
    text around the needle.

    Args:
        filler: sentences of the text, taken cyclically from a random start; None for other numbers,
            each with a different word.
        frame: text of a chat template before the context and after the question.
    """
    rng = random.Random(f"{seed} needle {number}")
    topic, value = _fact(rng)
    start = rng.randrange(len(filler)) if filler else 0
    before, after = frame
    question = f"\nWhat is {topic} mentioned in the text?{after or ' '}T{topic[1:]} is"
    room = length - answer_tokens(value, tokens)

    def sentence(i: int) -> str:
        if filler:
            return filler[(start + i) % len(filler)]
        return _sentence(*_fact(random.Random(f"{seed} needle {number} other {i}")))

    def context(amount: int) -> str:
        text = [sentence(i) for i in range(amount)]
        text.insert(round(depth * amount), _sentence(topic, value))
        return before + INTRODUCTION + " ".join(text)

    def used(amount: int) -> int:
        return tokens(context(amount) + question)

    if used(0) > room:
        least = length - room + used(0)
        raise ParameterError("length", f"a needle needs at least {least} tokens; raise it", length)
    high = 1
    while used(high) <= room:
        high *= 2
    amount = bisect.bisect_right(range(high), room, key=used) - 1
    return Item(context(amount), question, value, depth, length, number)


def _fact(rng: random.Random) -> tuple[str, str]:
    """Return the topic of a number, and the number."""
    word = "".join(rng.choice("bdfgklmnprstv") + rng.choice("aeiou") for _ in range(3))
    return f"the special magic number for {word}", str(rng.randrange(10**6, 10**7))


def _sentence(topic: str, value: str) -> str:
    return f"One of the facts: {topic} is {value}."


def chat_frame(tokenizer: Any) -> tuple[str, str]:
    """Return the text of a chat template around a user's message, empty without a template."""
    if tokenizer.chat_template is None:
        return "", ""
    mark = secrets.token_hex(16)
    turn = [{"role": "user", "content": mark}]
    rendered = render_chat(tokenizer.chat_template, turn, tokenizer.special_tokens)
    before, _, after = rendered.partition(mark)
    return before, after


def encoder(tokenizer: Any, frame: tuple[str, str]) -> Callable[[str], list[int]]:
    """Return the function that makes tokens of a prompt. A chat template adds its special ones."""
    if any(frame):
        return functools.partial(tokenizer.encode, add_special_tokens=False)
    return functools.partial(prefixed, tokenizer)


def measure(
    items: list[Item],
    encode: Callable[[str], list[int]],
    batch: int,
    engine: "Engine",
    advance: Callable[[int], object],
) -> Measurement:
    """Measure one engine: tokens of answers [items, n], -1 after the end."""
    from infinigen_jax.evaluation.answers import answer
    from infinigen_jax.evaluation.scoring import Traffic

    answers, total, vocabulary = [], Traffic(), engine.model.config.vocab_size
    # Neighbours of equal length have the same shapes.
    for _, alike in itertools.groupby(items, lambda item: item.length):
        group = list(alike)
        prompts = [encode(item.context + item.question) for item in group]
        check_vocabulary("model", itertools.chain(*prompts), vocabulary)
        questions = [
            len(prompt) - common_length(encode(item.context), prompt)
            for item, prompt in zip(group, prompts, strict=True)
        ]
        room = max(answer_tokens(item.answer, lambda text: len(encode(text))) for item in group)
        tokens, moved = answer(engine, prompts, max(1, *questions), room, batch, advance)
        answers.append(tokens)
        total += moved
    width = max(tokens.shape[1] for tokens in answers)
    padded = [
        np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])), constant_values=-1)
        for tokens in answers
    ]
    return Measurement({"answers": np.concatenate(padded)}, total.per_token())


def with_scores(
    measured: list[Measurement], items: list[Item], model: "Model"
) -> list[dict[str, Any]]:
    """Return the result's lines, with mean scores whole, and by length and depth."""
    reference: np.ndarray | None = None
    places = np.array([(item.length, item.depth) for item in items])
    numbers = np.array([item.number for item in items])
    lines = []
    for line in measured:
        answers = line.arrays["answers"]
        texts = [model.tokenizer.decode(row[row >= 0].tolist()) for row in answers]
        right = np.array([i.answer in text for i, text in zip(items, texts, strict=True)], float)
        same = None if reference is None else (answers == reference).all(axis=1)
        cells = [
            {"length": int(place[0]), "depth": float(place[1])}
            | _means(right, same, numbers, (places == place).all(axis=1))
            for place in np.unique(places, axis=0)
        ]
        whole = _means(right, same, numbers, np.ones(len(items), bool))
        lines.append(line.values | whole | {"cells": cells, "texts": texts})
        if line.values["reference"]:
            reference = answers
    return lines


def _means(
    right: np.ndarray, same: np.ndarray | None, numbers: np.ndarray, chosen: np.ndarray
) -> dict[str, Any]:
    """Return means of the chosen items; a needle at several depths counts once in the error."""
    means = [right[chosen & (numbers == one)].mean() for one in np.unique(numbers[chosen])]
    return {
        "items": int(chosen.sum()),
        "accuracy": float(right[chosen].mean()),
        "accuracy_standard_error": mean_and_error(np.array(means))[1],
        "same": None if same is None else float(same[chosen].mean()),
    }


def table_cells(line: dict[str, Any]) -> list[str]:
    """Return a line's cells of the quality columns."""
    error = line["accuracy_standard_error"]
    return [
        with_error(100 * line["accuracy"], None if error is None else 100 * error, 1),
        "" if line["same"] is None else percent(line["same"], 1),
    ]
