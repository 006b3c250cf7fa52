"""Perplexity of a text, for several policies and budgets, against the full cache.

The text is cut into windows; in each, the first tokens are context and the others are scored, by
the decode steps that generate text. All configurations score the same tokens, so their difference
to the full cache is paired, and its standard error much smaller than that of either.
"""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from infinigen_jax.evaluation.naming import labels
from infinigen_jax.evaluation.parts import Measurement
from infinigen_jax.evaluation.plots import Panel, against_fraction, draw
from infinigen_jax.evaluation.report import with_error
from infinigen_jax.evaluation.session import (
    Line,
    Session,
    add_common_options,
    result_table,
    traffic_of,
)
from infinigen_jax.evaluation.statistics import Nats, statistics
from infinigen_jax.evaluation.texts import read_text
from infinigen_jax.evaluation.windows import (
    add_window_options,
    check_window_numbers,
    cut_windows,
)

if TYPE_CHECKING:
    from infinigen_jax.engine import Engine

SUMMARY = "perplexity of a text, whole and by position"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this sub-command."""
    add_window_options(parser)
    add_common_options(parser, batch=4, of="windows")


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Evaluate all configurations, print their table and write the files."""
    session = Session.of(arguments, say)
    lines = measured_lines(session)
    session.finish(lines)
    if session.plot is not None:
        draw(session.plot, panels(lines), f"Perplexity, {session.record['model']['name']}")
    print(markdown(lines), flush=True)


def measured_lines(session: Session) -> list[dict[str, Any]]:
    """The result's lines, of all configurations of a session."""
    arguments = session.arguments
    check_window_numbers(arguments)
    text = read_text(arguments.text)
    model = session.load()
    windows, described = cut_windows(arguments, text, model)
    session.record |= described
    settings = described["settings"]
    total = windows.size - len(windows) * settings["context"]
    measured = session.measure(model, measuring(windows, settings), total, "tokens")
    return with_statistics(measured, settings)


def measuring(
    windows: np.ndarray, settings: dict[str, int]
) -> Callable[["Engine", Callable[[int], object]], Measurement]:
    """The measurement of one engine."""

    def measure(engine: "Engine", advance: Callable[[int], object]) -> Measurement:
        from infinigen_jax.evaluation.scoring import score_windows

        context, batch = settings["context"], settings["batch"]
        nats, traffic = score_windows(engine, windows, context, batch, advance)
        return Measurement({"nats": nats}, traffic_of(traffic))

    return measure


def with_statistics(measured: list[Line], settings: dict[str, int]) -> list[dict[str, Any]]:
    """The result's lines, compared with the reference if there is one."""
    reference: Nats | None = None
    lines = []
    for line in measured:
        nats = line.measured.arrays["nats"]
        numbers = statistics(nats, reference, settings["context"], settings["chunk"])
        lines.append(line.described | numbers | line.measured.values)
        if line.described["reference"]:
            reference = nats
    return lines


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table for stdout."""
    return result_table(lines, *quality(lines))


def quality(lines: list[dict[str, Any]]) -> tuple[list[str], Callable[[dict[str, Any]], list[str]]]:
    """Head of the table's columns of quality, and their cells of a line."""

    def cells(line: dict[str, Any]) -> list[str]:
        value, change = line["perplexity"], line["perplexity_change_percent"]
        return [
            "" if value is None else f"{value:.4f}",
            with_error(line["nats_per_token"], line["standard_error"]),
            with_error(line["difference_nats"], line["difference_standard_error"], 5),
            "" if change is None else f"{change:+.3f} %",
        ]

    return ["perplexity", "nats/token", "Δ nats", "Δ perplexity"], cells


def panels(lines: list[dict[str, Any]]) -> list[Panel]:
    """What --plot draws."""
    chunks = {
        label: [(c["from"], c["nats_per_token"]) for c in line["chunks"]]
        for label, line in zip(labels(lines), lines, strict=True)
    }
    return [
        against_fraction(lines, "perplexity", "perplexity"),
        Panel("position, tokens", "nats per token", chunks),
    ]
