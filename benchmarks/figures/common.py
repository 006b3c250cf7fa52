"""Common parts of the figures: options of the evaluation, one table, one file, one diagram."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.figures import accuracy
from benchmarks.plots import Panel, Point, checked_plot, draw
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation import perplexity
from infinigen_jax.evaluation.session import Session, add_common_options
from infinigen_jax.evaluation.texts import add_window_options

Lines = list[dict[str, Any]]
Cells = Callable[[dict[str, Any]], list[str]]
TITLES = {"perplexity": "perplexity", "accuracy": "accuracy, mean of the tasks"}  # of qualities


def add_evaluation_options(
    parser: argparse.ArgumentParser, *, tasks: bool, **defaults: Any
) -> None:
    """Add the options of `evaluate perplexity`, with other defaults, and of tasks if asked."""
    add_window_options(parser, required=not tasks)
    if tasks:
        accuracy.add_options(parser)
    add_common_options(parser, batch=8, of="windows or choices" if tasks else "windows")
    parser.add_argument("--plot", metavar="F", help="diagram: .png, .svg or .pdf; needs matplotlib")
    parser.set_defaults(**defaults)


def measure(session: Session) -> tuple[Lines, str]:
    """Measure all configurations of a session on --text or --tasks, whichever is given.

    Return the lines of the result, and the key of their quality, one of TITLES.
    """
    arguments = session.arguments
    checked_plot(arguments.plot)
    tasks = getattr(arguments, "tasks", None)
    if (arguments.text is None) == (tasks is None):
        raise InputError("give either --text F for perplexity or --tasks NAME for accuracy")
    if tasks is None:
        return perplexity.measured_lines(session), "perplexity"
    return accuracy.measured_lines(session), "accuracy"


def finish(
    session: Session,
    lines: Lines,
    number: str,
    panels: Sequence[Panel],
    head: Sequence[str] = (),
    cells: Cells = lambda line: [],
) -> None:
    """Write the files and print the table.

    Args:
        number: the paper's number of the figure.
        head, cells: headings and cells of columns before the quality columns.
    """
    session.record["figure"] = f"InfiniGen (OSDI 2024), {number}"
    heads, of_quality = perplexity.HEAD, perplexity.cells
    if "accuracy" in lines[0]:
        heads, of_quality = accuracy.quality(lines)
    session.finish(lines, [*head, *heads], lambda line: [*cells(line), *of_quality(line)])
    if (plot := checked_plot(session.arguments.plot)) is not None:
        name = session.record["model"]["name"]
        draw(plot, panels, f"{name}: as the paper's {number}")


def over(
    lines: Sequence[dict[str, Any]],
    name: Callable[[dict[str, Any]], str | None],
    x: Callable[[dict[str, Any]], float],
    y: str,
) -> dict[str, list[Point]]:
    """Return points (x, value y) of result lines by name, sorted by x."""
    curves: dict[str, list[Point]] = {}
    for line in lines:
        label = name(line)
        if label is not None and line[y] is not None:
            curves.setdefault(label, []).append((x(line), line[y]))
    return {label: sorted(points) for label, points in curves.items()}


def level(lines: Sequence[dict[str, Any]], y: str, xs: Sequence[float]) -> dict[str, list[Point]]:
    """Return the reference's value as a horizontal line; empty without a reference."""
    if not lines or not lines[0]["reference"] or not xs:
        return {}
    return {"full cache": [(min(xs), lines[0][y]), (max(xs), lines[0][y])]}
