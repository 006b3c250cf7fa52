"""Quality with a fixed number of tokens kept at growing context (the paper's figure 19).

For each length, windows of that many tokens are read and the last part is scored. In every layer
that selects rows, every policy attends to at most --kept tokens in addition to the current one,
resident or fetched. The paper keeps 64.
"""

import argparse
import copy
import dataclasses
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from benchmarks.figures.common import Measured, finish, measure, over
from benchmarks.figures.common import add_options as add_evaluation_options
from benchmarks.plots import Panel
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.session import Session
from infinigen_jax.numeric import check_range
from infinigen_jax.policies import POLICIES

SUMMARY = "a fixed number of tokens kept at growing length (figure 19)"
SCORED = 8  # divisor: the last eighth of a window is scored
RESIDENT = {"infinigen-paper": (0, 1)}  # sinks and window; those of other policies:
SINKS = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this figure."""
    add_evaluation_options(
        parser, tasks=False, policy=["infinigen", "infinigen-paper", "h2o", "window"]
    )
    add = parser.add_argument
    add("--kept", type=int, default=64, metavar="N", help="tokens attended to (default 64)")
    add(
        "--length",
        nargs="+",
        type=int,
        metavar="N",
        help="tokens per window (default: powers of two from four times --kept)",
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Measure, print the table and write the files."""
    check_range("--kept", arguments.kept, SINKS + 4)
    for length in arguments.length or []:
        check_range("--length", length, 2 * arguments.kept)
    for given in ("window", "context", "budget"):
        if getattr(arguments, given) is not None:
            raise InputError(f"--{given}: this figure sets it; give --length and --kept")
    if any(":" in name for name in arguments.policy):
        raise InputError("--policy: this figure sets the settings of a policy; give its name alone")
    lines: list[dict[str, Any]] = []
    measured = None
    for length in arguments.length or _lengths(arguments, say):
        measured = _measure_length(arguments, length, say)
        lines += [line | {"length": length} for line in measured.lines]
    assert measured is not None
    titles = {
        "perplexity": "perplexity",
        "perplexity_change_percent": "perplexity above the full cache's, %",
    }
    panels = [
        Panel("length, tokens", title, over(lines, itemgetter("policy"), itemgetter("length"), key))
        for key, title in titles.items()
    ]
    # Settings that differ between lengths belong to the lines.
    measured.session.record["settings"] |= {"kept": arguments.kept, "window": None, "context": None}
    finish(
        measured._replace(lines=lines),
        "figure 19",
        panels,
        head=["length"],
        cells=lambda line: [str(line["length"])],
    )


def _lengths(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[int]:
    """Return the powers of two that the model has positions for."""
    model = Session.of(arguments, say).load()
    length, lengths = 4 * arguments.kept, []
    while length <= model.config.max_positions:
        lengths.append(length)
        length *= 2
    if not lengths:
        raise InputError(
            f"--kept {arguments.kept}: the model has only {model.config.max_positions} positions; "
            "lower it"
        )
    return lengths


def _measure_length(
    arguments: argparse.Namespace, length: int, say: Callable[[str], None]
) -> Measured:
    """Measure all policies at one length, without repeating finished measurements."""
    chosen = copy.copy(arguments)
    chosen.window, chosen.context = length, length - length // SCORED
    chosen.policy = [keeping(name, arguments.kept, length) for name in arguments.policy]
    return measure(chosen, Session.of(chosen, say))


def keeping(name: str, kept: int, length: int) -> str:
    """Return a policy with settings that attend to `kept` past tokens at the end of a window."""
    if name == "full":
        return name
    sinks, window = RESIDENT.get(name, (SINKS, kept // 2 - SINKS + 1))
    fetched = kept - sinks - (window - 1)
    settings = {"budget": fetched / length, "sinks": sinks, "window": window}
    if any(field.name == "layer_budgets" for field in dataclasses.fields(POLICIES[name])):
        settings["layer_budgets"] = "equal"
    return f"{name}:{','.join(f'{key}={value}' for key, value in settings.items())}"
