"""Needles in a long text: accuracy of greedy answers for several policies and budgets.

A number is hidden at some depth of a text of any length. The text is prefilled; question and answer
are decoded, through the model's chat template if it has one. An answer is right if it contains the
number. `same` is the share of answers that equal the full cache's token for token, which
distinguishes policies even if the model finds no needle.
Other tasks: lm-evaluation-harness, with its adapter (`lm_eval`).
"""

import argparse
import functools
import itertools
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from infinigen_jax.errors import ParameterError
from infinigen_jax.evaluation.haystacks import GRASS, Item, answer_tokens, make_item, sentences
from infinigen_jax.evaluation.parts import Measurement
from infinigen_jax.evaluation.report import percent, with_error
from infinigen_jax.evaluation.session import Session, add_common_options, traffic_of
from infinigen_jax.evaluation.statistics import mean_and_error
from infinigen_jax.evaluation.texts import Text, common_length, prefixed
from infinigen_jax.numeric import Range, whole_number
from infinigen_jax.text.templates import render_chat
from infinigen_jax.text.tokenizer import check_vocabulary

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.loading.load import Model

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SUMMARY = "numbers in a text of any length, at any depth"


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--length",
        nargs="+",
        type=whole_number(16),
        metavar="N",
        help="tokens of an item, including the answer (default: the model's positions)",
    )
    add(
        "--depth",
        nargs="+",
        type=Range(0, 1),
        default=list(DEPTHS),
        metavar="D",
        help="depths of the number in the text, 0 to 1 (default 0 0.25 0.5 0.75 1)",
    )
    add(
        "--items",
        type=whole_number(1),
        default=10,
        metavar="M",
        help="items per length and depth (default 10)",
    )
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
    session = Session.of(arguments, say)
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

    answers, total = [], Traffic()
    # Neighbours of equal length have the same shapes.
    for _, group in itertools.groupby(items, lambda item: item.length):
        prompts, decoded, room = prepare(list(group), encode, engine.model)
        tokens, moved = answer(engine, prompts, decoded, room, batch, advance)
        answers.append(tokens)
        total += moved
    width = max(tokens.shape[1] for tokens in answers)
    padded = [
        np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])), constant_values=-1)
        for tokens in answers
    ]
    return Measurement({"answers": np.concatenate(padded)}, traffic_of(total))


def prepare(
    group: list[Item], encode: Callable[[str], list[int]], model: "Model"
) -> tuple[list[list[int]], int, int]:
    """Return prompts, the number of question tokens at their end, and the room for an answer."""
    prompts = [encode(item.context + item.question) for item in group]
    check_vocabulary("model", itertools.chain(*prompts), model.config.vocab_size)
    decoded = 1
    for item, prompt in zip(group, prompts, strict=True):
        decoded = max(decoded, len(prompt) - common_length(encode(item.context), prompt))
    room = max(answer_tokens(item.answer, lambda text: len(encode(text))) for item in group)
    return prompts, decoded, room


def with_scores(
    measured: list[Measurement], items: list[Item], model: "Model"
) -> list[dict[str, Any]]:
    """Return the result's lines, with mean scores whole, and by length and depth."""
    reference: np.ndarray | None = None
    places = np.array([(item.length, item.depth) for item in items])
    lines = []
    for line in measured:
        answers = line.arrays["answers"]
        texts = [model.tokenizer.decode(row[row >= 0].tolist()) for row in answers]
        right = np.array([i.answer in text for i, text in zip(items, texts, strict=True)], float)
        same = None if reference is None else (answers == reference).all(axis=1)
        cells = [
            {"length": int(place[0]), "depth": float(place[1])}
            | _means(right, same, items, (places == place).all(axis=1))
            for place in np.unique(places, axis=0)
        ]
        whole = _means(right, same, items, np.ones(len(items), bool))
        lines.append(line.values | whole | {"cells": cells, "texts": texts})
        if line.values["reference"]:
            reference = answers
    return lines


def _means(
    right: np.ndarray, same: np.ndarray | None, items: list[Item], chosen: np.ndarray
) -> dict[str, Any]:
    """Return means of the chosen items; a needle at several depths counts once in the error."""
    numbers = np.array([item.number for item in items])
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
