"""A reference model, trained and measured in limited time, the most important first.

    python -m benchmarks.reference_models.on_gpu --data DATA --out OUT --minutes 9

Each step is a process, and what it makes is in OUT as soon as it is done: the training and its
export, the report, the conversion, then perplexity, lookups and recall at the model's whole
context, of the full cache and InfiniGen before the others. The same command again goes on: with a
training that the time ended, by its checkpoint, or with the steps that are missing. OUT/summary.md
holds all tables, OUT/log.txt the notes.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import IO

from benchmarks.files import note
from benchmarks.processes import run_within
from benchmarks.quality import BUDGETS, RECALL
from benchmarks.reference_models.recipes import SHAPES, SIZES
from infinigen_jax.atomic import whole_file
from infinigen_jax.errors import InputError, Parser, run_command

GRACE = 20.0  # seconds that an interrupted training has to write its state
LEAST_TRAINING = 0.5  # minutes to go on with
THERE = "there already"


@dataclasses.dataclass(frozen=True)
class Step:
    """A process of the session.

    Attributes:
        command: of the module.
        result: what it makes; with that there, it is not run.
        needs: what it is made of.
        least: seconds; with less left, it is not begun.
        grace: seconds of the time left in which it is told to save and end.
    """

    name: str
    command: tuple[str, ...]
    result: Path
    needs: Path
    least: float
    grace: float = 0.0


MEASURED = ("perplexity", "needles", "recall")
PERPLEXITY = ("--windows", "24", "--batch", "24", *BUDGETS)
NEEDLES = ("--task", "needle", "--items", "10", "--batch", "50", *BUDGETS, "--length")
NAMES = ("train", "report", "convert", *MEASURED, *(f"{name}-others" for name in MEASURED))
OURS, OTHERS = ("full", "infinigen"), ("full", "window", "h2o", "quest")


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.reference_models.on_gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--data", type=Path, required=True, help="prepared tokens (train --prepare-only)")
    add("--out", type=Path, required=True, help="folder for all that is made")
    add("--minutes", type=float, default=9.0, help="for all of it (default 9)")
    add(
        "--train-minutes",
        type=float,
        default=8.0,
        metavar="MINUTES",
        help="of them for the training; may be more, and is then spread over calls (default 8)",
    )
    add("--tokens", type=int, help="train on so many instead, whatever time it takes")
    add("--shape", choices=SHAPES, default="llama")
    add("--size", choices=SIZES, default="gpu")
    add("--steps", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    return parser


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()
    options = build_parser().parse_args(argv)
    return run_command(lambda: run(options, started))


def run(options: argparse.Namespace, started: float) -> int:
    """Do the steps that are missing; 0 if none is missing then.

    Raises:
        InputError: for a time that is none, or data that are not there.
    """
    for name in ("minutes", "train_minutes"):
        if getattr(options, name) <= 0:
            raise InputError(f"--{name.replace('_', '-')}: give a positive number")
    if options.tokens is not None and options.tokens <= 0:
        raise InputError("--tokens: give a positive number")
    held_out = _held_out(options.data)
    text = options.out / "held-out.txt"
    options.out.mkdir(parents=True, exist_ok=True)
    if not text.exists():
        with whole_file(text) as file:
            file.write(held_out.encode())
    end = started + 60 * options.minutes
    chosen = [step for step in steps(options, text) if step.name in options.steps]
    summary = options.out / "summary.md"
    with open(options.out / "log.txt", "a") as log:
        statuses = perform(chosen, summary, end, log)
    if summary.exists():
        print(summary.read_text())
    return 0 if statuses <= {"done", THERE} else 1


def perform(chosen: list[Step], summary: Path, end: float, log: IO[str]) -> set[str]:
    """Run steps one after the other until `end` of `time.monotonic()`.

    Returns:
        what became of them: "done", "there already", "not started", "interrupted", "out of time",
        or an exit status.
    """
    statuses = set()
    for step in chosen:
        begun = time.monotonic()
        status, text = _perform(step, end - begun, log)
        took = f"{status}, {time.monotonic() - begun:.0f} s"
        note(f"{step.name}: {took}")
        statuses.add(status)
        if status not in (THERE, "not started"):
            with open(summary, "a") as file:
                file.write(f"## {step.name} ({took})\n\n{text}\n")
    return statuses


def _perform(step: Step, left: float, log: IO[str]) -> tuple[str, str]:
    """What became of a step, and what it wrote to stdout."""
    if step.result.exists():
        return THERE, ""
    if left < step.least or not step.needs.exists():
        return "not started", ""
    status, text = run_within(step.command, left - step.grace, log, gently=step.grace)
    if status is None:
        return "out of time", text
    if status == 143:  # it has saved what it had
        return "interrupted", text
    return "done" if status == 0 else f"status {status}", text


def steps(options: argparse.Namespace, text: Path) -> list[Step]:
    """All steps, the most important first.

    Args:
        text: of the held-out books.
    """
    out, context = options.out, SIZES[options.size].context
    training, converted = out / "training", out / "converted"
    model, trained = training / "model", training / "loss.json"
    windows = ("--text", str(text), "--window", str(context), "--chunk", str(context // 8))
    # By default the baselines have two layers on the device, where any policy looks things up. So
    # all are on the host, and InfiniGen has the query that needs none of those.
    streamed = ("--dense-layers", "0", "--policy", "full", "infinigen:query=own", *OTHERS[1:])
    commands = {
        "report": (
            "benchmarks.reference_models.report",
            *("--model", str(model), "--data", str(options.data)),
        ),
        "perplexity": _evaluate("perplexity", *windows, *PERPLEXITY, "--policy", *OURS),
        "needles": _evaluate("retrieval", *NEEDLES, str(context), "--policy", *OURS),
        "recall": _evaluate("recall", *windows, *RECALL, "--no-reference", "--policy", OURS[1]),
        "perplexity-others": _evaluate("perplexity", *windows, *PERPLEXITY, "--policy", *OTHERS),
        "needles-others": _evaluate("retrieval", *NEEDLES, str(context), *streamed),
        "recall-others": _evaluate(
            *("recall", *windows, *RECALL, "--no-reference", "--policy", *OTHERS[1:]),
        ),
    }
    found = [
        Step("train", _training(options, training), trained, options.data, 60.0, GRACE),
        Step(
            "convert",
            ("infinigen_jax.convert", str(model), str(converted)),
            *(converted, trained, 20.0),
        ),
    ]
    for name, command in commands.items():
        evaluates = name != "report"
        command += ("--model", str(converted)) if evaluates else ()
        result = out / f"{name}.json"
        needs = converted if evaluates else trained
        found.append(Step(name, (*command, "--json", str(result)), result, needs, 30.0))
    return sorted(found, key=lambda step: NAMES.index(step.name))


def _evaluate(name: str, *arguments: str) -> tuple[str, ...]:
    return ("infinigen_jax.evaluate", name, "--quiet", *arguments)


def _training(options: argparse.Namespace, folder: Path) -> tuple[str, ...]:
    """The command that trains, or goes on with a training that was interrupted."""
    from benchmarks.reference_models import checkpoints
    from benchmarks.reference_models.training import CHECKPOINT

    command = ("benchmarks.reference_models.train", "--shape", options.shape)
    command += ("--size", options.size, "--data", str(options.data), "--out", str(folder))
    minutes = options.train_minutes
    if (folder / CHECKPOINT).exists():
        command += ("--resume",)
        spent = checkpoints.describe(folder / CHECKPOINT)["clock"]["seconds"]
        minutes = max(minutes - spent / 60, LEAST_TRAINING)
    if options.tokens is not None:
        return (*command, "--tokens", str(options.tokens))
    return (*command, "--minutes", f"{minutes:.2f}")


def _held_out(data: Path) -> str:
    """The text of the held-out books.

    Raises:
        InputError: if there are no prepared tokens.
    """
    if not (data / "corpus.json").exists():
        raise InputError(
            f"--data {data}: holds no prepared tokens; make them from books with "
            "`python -m benchmarks.reference_models.train --prepare-only`"
        )
    from benchmarks.reference_models.corpus import open_corpus

    corpus = open_corpus(data)
    starts = corpus.val.starts
    books = [corpus.val.tokens[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]
    return "\n\n".join(corpus.tokenizer.decode_batch(books)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
