"""Multiple choice by likelihood (COPA, OpenBookQA, WinoGrande, PIQA, RTE), from local files.

The context is prefilled, each choice decoded and scored; the likeliest is the answer. With few
shots, items of the same file with their answers go in front. `normalised` chooses by likelihood per
character. `same` is the share of items in which the choice is the full cache's. With a context of a
few dozen tokens nothing is left to select: all of it stays on the device.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.parts import Measurement
from infinigen_jax.evaluation.plots import Panel, against_fraction, draw
from infinigen_jax.evaluation.report import described_file, percent
from infinigen_jax.evaluation.session import (
    Line,
    Session,
    add_common_options,
    result_table,
    traffic_of,
)
from infinigen_jax.evaluation.statistics import mean_and_error
from infinigen_jax.evaluation.task_files import Choices, read_choices
from infinigen_jax.evaluation.texts import beginning, split_behind
from infinigen_jax.numeric import whole_number

if TYPE_CHECKING:
    from infinigen_jax.checkpoint import Model
    from infinigen_jax.engine import Engine
    from infinigen_jax.evaluation.likelihood import Continuation

SUMMARY = "COPA, OpenBookQA, WinoGrande, PIQA, RTE by likelihood, from jsonl files"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this sub-command."""
    add_task_options(parser)
    add_common_options(parser, batch=8, of="choices")


def add_task_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --data, --shots, --items and --seed."""
    add = parser.add_argument
    add("--data", nargs="+", metavar="F", required=required, help="jsonl files, plain or .gz")
    add(
        "--shots",
        type=whole_number(0),
        default=0,
        metavar="K",
        help="items with their answers in front of each (default 0)",
    )
    add(
        "--items",
        type=whole_number(1),
        metavar="M",
        help="most items of a file, spread evenly over it (default: all)",
    )
    add("--seed", type=whole_number(0), default=0, help="of the choice of shots (default 0)")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Evaluate all configurations, print their table and write the files."""
    session = Session.of(arguments, say)
    lines = measured_lines(session)
    session.finish(lines)
    if session.plot is not None:
        draw(session.plot, panels(lines), f"Tasks, {session.record['model']['name']}")
    print(markdown(lines), flush=True)


def measured_lines(session: Session) -> list[dict[str, Any]]:
    """The result's lines, of all configurations of a session."""
    arguments = session.arguments
    files = {Path(path).name.split(".")[0]: read_choices(path) for path in arguments.data}
    if len(files) < len(arguments.data):
        raise InputError("--data: two files of the same name; rename one")
    model = session.load()
    tasks = {
        name: with_shots(items, arguments.shots, arguments.seed, arguments.items)
        for name, items in files.items()
    }
    asked = {name: continuations(items, model) for name, items in tasks.items()}
    room = model.config.max_positions
    for name, choices in asked.items():
        if cut := sum(len(one.context) + len(one.text) > room for one in choices):
            session.say(
                f"{name}: {cut} of {len(choices)} choices are longer than the model's {room} "
                "positions, and their beginning is left out; lower --shots"
            )
    session.record["settings"] = {
        "data": [described_file(path) for path in arguments.data],
        "shots": arguments.shots,
        "items": arguments.items,
        "batch": arguments.batch,
        "seed": arguments.seed,
    }
    total = sum(map(len, asked.values()))
    measured = list(session.measure(model, measuring(asked, arguments.batch), total, "choices"))
    return with_scores(measured, tasks)


def with_shots(items: list[Choices], shots: int, seed: int, most: int | None) -> list[Choices]:
    """Items, evenly spread over all, with `shots` other ones in front of each.

    Raises:
        InputError: if there are not so many others.
    """
    if shots >= len(items):
        raise InputError(f"--shots {shots}: a file has only {len(items)} items; lower it")
    count = len(items) if most is None else min(most, len(items))
    made = []
    for number in (i * len(items) // count for i in range(count)):
        others = [i for i in range(len(items)) if i != number]
        chosen = random.Random(f"{seed} {number}").sample(others, shots)
        front = "".join(items[i].example + "\n\n" for i in chosen)
        item = items[number]
        made.append(Choices(tuple(front + c for c in item.contexts), item.texts, item.gold))
    return made


def continuations(items: list[Choices], model: "Model") -> list["Continuation"]:
    """What is to be scored: all choices of all items, in order."""
    from infinigen_jax.evaluation.likelihood import Continuation

    first = beginning(model.tokenizer, model.config)
    made = [
        Continuation(*split_behind(model.tokenizer, context, text, first))
        for item in items
        for context, text in zip(item.contexts, item.texts, strict=True)
    ]
    top = max(max([*one.context, *one.text]) for one in made)
    if top >= model.config.vocab_size:
        raise InputError(
            f"--model: token {top} is not among the model's {model.config.vocab_size} tokens; "
            "the tokenizer is not this model's"
        )
    return made


def measuring(
    asked: dict[str, list["Continuation"]], batch: int
) -> Callable[["Engine", Callable[[int], object]], Measurement]:
    """The measurement of one engine: log-likelihoods, an array for each file."""

    def measure(engine: "Engine", advance: Callable[[int], object]) -> Measurement:
        from infinigen_jax.evaluation.likelihood import likelihoods
        from infinigen_jax.evaluation.scoring import Traffic

        arrays, total = {}, Traffic()
        for name, choices in asked.items():
            scores, moved = likelihoods(engine, choices, batch, advance)
            arrays[f"task {name}"] = scores[:, 0]
            total += moved
        return Measurement(arrays, traffic_of(total))

    return measure


def with_scores(measured: list[Line], tasks: dict[str, list[Choices]]) -> list[dict[str, Any]]:
    """The result's lines, by task and their mean."""
    reference: dict[str, np.ndarray] | None = None
    lines = []
    for line in measured:
        parts, chosen = [], {}
        for name, items in tasks.items():
            right, normalised, chosen[name] = _answers(items, line.measured.arrays[f"task {name}"])
            mean, error = mean_and_error(right)
            same = None if reference is None else float((chosen[name] == reference[name]).mean())
            parts.append(
                {
                    "task": name,
                    "items": len(items),
                    "accuracy": mean,
                    "accuracy_standard_error": error,
                    "accuracy_normalised": float(normalised.mean()),
                    "same": same,
                }
            )
        means = {
            key: None if parts[0][key] is None else float(np.mean([part[key] for part in parts]))
            for key in ("accuracy", "accuracy_normalised", "same")
        }
        lines.append(line.described | means | {"tasks": parts} | line.measured.values)
        if line.described["reference"]:
            reference = chosen
    return lines


def _answers(items: list[Choices], scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each item: is the likeliest choice right, is the likeliest per character, which it is."""
    right, normalised, chosen, start = [], [], [], 0
    for item in items:
        own = scores[start : start + len(item.texts)]
        start += len(item.texts)
        # Without the space in front, which is no part of the choice.
        per_character = own / [max(len(text.strip()), 1) for text in item.texts]
        chosen.append(int(own.argmax()))
        right.append(float(chosen[-1] == item.gold))
        normalised.append(float(per_character.argmax() == item.gold))
    return np.array(right), np.array(normalised), np.array(chosen)


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table for stdout."""
    return result_table(lines, *quality(lines))


def quality(lines: list[dict[str, Any]]) -> tuple[list[str], Callable[[dict[str, Any]], list[str]]]:
    """Head of the table's columns of quality, and their cells of a line."""
    tasks = [part["task"] for part in lines[0]["tasks"]]

    def cells(line: dict[str, Any]) -> list[str]:
        return [
            *(percent(part["accuracy"], 1) for part in line["tasks"]),
            percent(line["accuracy"], 1),
            percent(line["accuracy_normalised"], 1),
            "" if line["same"] is None else percent(line["same"], 1),
        ]

    return [*tasks, "mean", "normalised", "same"], cells


def panels(lines: list[dict[str, Any]]) -> list[Panel]:
    """What --plot draws."""
    return [
        against_fraction(lines, "accuracy", "accuracy, mean of the tasks"),
        against_fraction(lines, "same", "choices equal to the full cache's"),
    ]
