"""Retrieval from a long text: accuracy of greedy answers for several policies and budgets.

Problems are generated (needle, kv, variables, aggregation) at any length and depth, or read from
files of "Lost in the Middle" (--data). The context is prefilled; question and answer are decoded.
The score of an answer is the share of the expected strings that it contains (for "qa" whether it
contains any). `same` is the share of answers that equal the full cache's token for token, which
distinguishes policies even if the model is too weak for the problems.
"""

import argparse
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.haystacks import (
    GRASS,
    TASKS,
    WITH_DEPTH,
    Item,
    answer_tokens,
    make_items,
    normalised,
    sentences,
)
from infinigen_jax.evaluation.lost_in_the_middle import read_items
from infinigen_jax.evaluation.naming import labels
from infinigen_jax.evaluation.parts import Measurement
from infinigen_jax.evaluation.plots import Panel, against_fraction, draw
from infinigen_jax.evaluation.report import described_file, percent, with_error
from infinigen_jax.evaluation.session import (
    Line,
    Session,
    add_common_options,
    result_table,
    traffic_of,
)
from infinigen_jax.evaluation.statistics import mean_and_error
from infinigen_jax.evaluation.texts import prefixed, read_text
from infinigen_jax.numeric import number, whole_number

if TYPE_CHECKING:
    from infinigen_jax.engine.engine import Engine
    from infinigen_jax.loading.load import Model

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
SUMMARY = "needle, key-value, variables and aggregation at any length and depth"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this sub-command."""
    add = parser.add_argument
    add(
        "--task",
        nargs="+",
        metavar="T",
        help=f"{', '.join(TASKS)} (default: all of them, or none with --data)",
    )
    add(
        "--data",
        nargs="+",
        metavar="F",
        default=[],
        help="files of Lost in the Middle (key-value retrieval or QA), .jsonl or .jsonl.gz",
    )
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
        type=number(0, 1),
        metavar="D",
        help="depth of the answer in needle and kv, 0 to 1 (default 0 0.25 0.5 0.75 1)",
    )
    add(
        "--items",
        type=whole_number(1),
        default=10,
        metavar="M",
        help="items per task, length and depth, or per file (default 10)",
    )
    add("--haystack", metavar="F", help="text around the answers (default: about grass and sky)")
    add("--seed", type=whole_number(0), default=0, help="seed of the generated items (default 0)")
    add(
        "--max-new-tokens",
        type=whole_number(1),
        metavar="N",
        help="tokens of an answer (default: length of a task's longest answer plus 8)",
    )
    add_common_options(parser, batch=8, of="items")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Evaluate all configurations, print the table and write the files."""
    chosen = arguments.task or ([] if arguments.data else list(TASKS))
    for task in chosen:
        if task not in TASKS:
            raise InputError(f"--task {task}: use {' or '.join(TASKS)}")
    depths = arguments.depth or list(DEPTHS)
    haystack = None if arguments.haystack is None else read_text(arguments.haystack, "--haystack")
    filler = sentences(GRASS if haystack is None else haystack.content)
    if not filler:
        raise InputError(f"--haystack {arguments.haystack}: no sentences; give some text")
    session = Session.of(arguments, say)
    model = session.load()
    if arguments.depth and not set(chosen) & set(WITH_DEPTH):
        say(f"--depth: only {' and '.join(WITH_DEPTH)} use it; files have fixed depths")
    items = collect(arguments, chosen, depths, filler, model, say)
    session.record |= {
        "settings": {
            "tasks": chosen,
            "data": [described_file(path) for path in arguments.data],
            "lengths": arguments.length or [model.config.max_positions],
            "depths": depths,
            "items": arguments.items,
            "batch": arguments.batch,
            "max_new_tokens": arguments.max_new_tokens,
            "seed": arguments.seed,
            "haystack": haystack and {"file": haystack.name, "sha256": haystack.sha256},
        },
        "items": len(items),
    }
    measure = measuring(items, arguments.batch, arguments.max_new_tokens)
    measured = list(session.measure(model, measure, len(items), "items"))
    lines = with_scores(measured, items, model)
    session.finish(lines)
    if session.plot is not None:
        draw(session.plot, panels(lines), f"Retrieval, {session.record['model']['name']}")
    print(markdown(lines), flush=True)


def collect(
    arguments: argparse.Namespace,
    chosen: list[str],
    depths: list[float],
    filler: list[str],
    model: "Model",
    say: Callable[[str], None],
) -> list[Item]:
    """Return the generated items and those of the files."""
    positions = model.config.max_positions
    lengths = arguments.length or [positions]
    for length in lengths:
        if length > positions:
            raise InputError(f"--length {length}: the model has {positions} positions; lower it")

    def tokens(text: str) -> int:
        return len(prefixed(model.tokenizer, text))

    items = make_items(chosen, lengths, depths, arguments.items, arguments.seed, filler, tokens)
    for path in arguments.data:
        for length in lengths:
            items += read_items(path, arguments.items, length, tokens, say)
    return items


def measuring(
    items: list[Item], batch: int, new: int | None
) -> Callable[["Engine", Callable[[int], object]], Measurement]:
    """Return the function that measures one engine: tokens [items, n], -1 after the end."""

    def measure(engine: "Engine", advance: Callable[[int], object]) -> Measurement:
        from infinigen_jax.evaluation.answers import answer
        from infinigen_jax.evaluation.scoring import Traffic

        answers, total = [], Traffic()
        for group in groups(items):
            prompts, decoded, room = prepare(group, engine.model)
            tokens, moved = answer(engine, prompts, decoded, new or room, batch, advance)
            answers.append(tokens)
            total += moved
        width = max(tokens.shape[1] for tokens in answers)
        padded = [
            np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])), constant_values=-1)
            for tokens in answers
        ]
        return Measurement({"answers": np.concatenate(padded)}, traffic_of(total))

    return measure


def groups(items: list[Item]) -> list[list[Item]]:
    """Group neighbours of equal task and length, which have the same shapes."""
    keyed = itertools.groupby(items, lambda item: (item.task, item.length))
    return [list(group) for _, group in keyed]


def prepare(group: list[Item], model: "Model") -> tuple[list[list[int]], int, int]:
    """Return prompts, the number of question tokens at their end, and the room for an answer."""

    def tokens(text: str) -> int:
        return len(prefixed(model.tokenizer, text))

    prompts = [prefixed(model.tokenizer, item.context + item.question) for item in group]
    top = max(max(prompt) for prompt in prompts)
    if top >= model.config.vocab_size:
        raise InputError(
            f"--model: token {top} is not among the model's {model.config.vocab_size} tokens; "
            "the tokenizer is not this model's"
        )
    decoded = 1
    for item, prompt in zip(group, prompts, strict=True):
        context = prefixed(model.tokenizer, item.context)
        pairs = zip(context, prompt, strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        decoded = max(decoded, len(prompt) - common)
    room = max(answer_tokens(item.answers[:1] if item.task == "qa" else item.answers, tokens)
               for item in group)  # fmt: skip
    return prompts, decoded, room


def with_scores(measured: list[Line], items: list[Item], model: "Model") -> list[dict[str, Any]]:
    """Return the result's lines, with mean scores by task, length and depth."""
    reference: np.ndarray | None = None
    problems, lines = _problems(items), []
    for line in measured:
        answers = line.measured.arrays["answers"]
        texts = [model.tokenizer.decode(row[row >= 0].tolist()) for row in answers]
        scores = np.array([score(item, text) for item, text in zip(items, texts, strict=True)])
        same = None if reference is None else (answers == reference).all(axis=1)
        numbers = _means(scores, same, problems, np.ones(len(items), bool))
        keys = sorted({(item.task, item.length, item.depth or 0.0) for item in items})
        parts = []
        for task in dict.fromkeys(item.task for item in items):
            chosen = np.array([item.task == task for item in items])
            parts.append({"task": task} | _means(scores, same, problems, chosen))
        cells = []
        for key in keys:
            chosen = np.array([(i.task, i.length, i.depth or 0.0) == key for i in items])
            depth = key[2] if key[0] in (*WITH_DEPTH, "qa") else None
            name = {"task": key[0], "length": key[1], "depth": depth}
            cells.append(name | _means(scores, same, problems, chosen))
        lines.append(
            line.described
            | numbers
            | {"tasks": parts, "cells": cells, "texts": texts}
            | line.measured.values
        )
        if line.described["reference"]:
            reference = answers
    return lines


def _problems(items: list[Item]) -> np.ndarray:
    """Return each item's problem number, equal for all lengths and depths: [items]."""
    known: dict[tuple[str, str], int] = {}
    return np.array([known.setdefault((i.task, i.problem), len(known)) for i in items])


def _means(
    scores: np.ndarray, same: np.ndarray | None, problems: np.ndarray, chosen: np.ndarray
) -> dict[str, Any]:
    """Return means of the chosen items; one problem at several depths counts once in the error."""
    distinct = np.unique(problems[chosen])
    means = np.array([scores[chosen & (problems == problem)].mean() for problem in distinct])
    return {
        "items": int(chosen.sum()),
        "accuracy": float(scores[chosen].mean()),
        "accuracy_standard_error": mean_and_error(means)[1],
        "same": None if same is None else float(same[chosen].mean()),
    }


def score(item: Item, text: str) -> float:
    """Return the share of the answers that a text contains; for "qa" 1 if it contains any."""
    if item.task == "qa":
        return float(any(normalised(a) in normalised(text) for a in item.answers))
    contained = [answer.lower() in text.lower() for answer in item.answers]
    return sum(contained) / len(contained)


def markdown(lines: list[dict[str, Any]]) -> str:
    """Format the table for stdout."""
    tasks = [part["task"] for part in lines[0]["tasks"]]

    def cells(line: dict[str, Any]) -> list[str]:
        error = line["accuracy_standard_error"]
        return [
            *(percent(part["accuracy"], 1) for part in line["tasks"]),
            with_error(100 * line["accuracy"], None if error is None else 100 * error, 1),
            "" if line["same"] is None else percent(line["same"], 1),
        ]

    return result_table(lines, [*tasks, "all, %", "same"], cells)


def panels(lines: list[dict[str, Any]]) -> list[Panel]:
    """Return the panels of --plot."""
    depths: dict[str, list[Any]] = {}
    for label, line in zip(labels(lines), lines, strict=True):
        cells = [cell for cell in line["cells"] if cell["depth"] is not None]
        places = sorted({cell["depth"] for cell in cells})
        depths[label] = [
            (place, float(np.mean([c["accuracy"] for c in cells if c["depth"] == place])))
            for place in places
        ]
    return [
        against_fraction(lines, "accuracy", "accuracy"),
        Panel("depth of the answer", "accuracy", {k: v for k, v in depths.items() if v}),
    ]
