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

from benchmarks.figures.common import add_evaluation_options, finish, measure, over
from benchmarks.plots import Panel
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.session import Session
from infinigen_jax.numeric import check_range, whole_number
from infinigen_jax.policies import POLICIES

SUMMARY = "a fixed number of tokens kept at growing length (figure 19)"
SCORED = 8  # divisor: the last eighth of a window is scored
RESIDENT = {"infinigen-paper": (0, 1)}  # sinks and window; those of other policies:
SINKS = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    policies = ["infinigen", "infinigen-paper", "h2o", "window"]
    add_evaluation_options(parser, tasks=False, policy=policies)
    add, kept = parser.add_argument, whole_number(SINKS + 4)
    add("--kept", type=kept, default=64, metavar="N", help="tokens attended to (default 64)")
    lengths = "tokens per window (default: powers of two from four times --kept)"
    add("--length", nargs="+", type=whole_number(1), metavar="N", help=lengths)


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    for length in arguments.length or []:
        check_range("--length", length, 2 * arguments.kept)
    for given in ("window", "context", "budget"):
        if getattr(arguments, given) is not None:
            raise InputError(f"--{given}: this figure sets it; give --length and --kept")
    if any(":" in name for name in arguments.policy):
        raise InputError("--policy: this figure sets the settings of a policy; give its name alone")
    session = Session(arguments, say)
    lines: list[dict[str, Any]] = []
    for length in arguments.length or _lengths(session):
        chosen = copy.copy(arguments)
        chosen.window, chosen.context = length, length - length // SCORED
        chosen.policy = [keeping(name, arguments.kept, length) for name in arguments.policy]
        session = Session(chosen, say)
        lines += [line | {"length": length} for line in measure(session)[0]]

    def panel(title: str, key: str) -> Panel:
        points = over(lines, itemgetter("policy"), itemgetter("length"), key)
        return Panel("length, tokens", title, points)

    above = "perplexity above the full cache's, %"
    panels = [panel("perplexity", "perplexity"), panel(above, "perplexity_change_percent")]
    # Settings that differ between lengths belong to the lines.
    session.record["settings"] |= {"kept": arguments.kept, "window": None, "context": None}
    finish(session, lines, "figure 19", panels, ["length"], lambda line: [str(line["length"])])


def _lengths(session: Session) -> list[int]:
    """Return the powers of two that the model has positions for."""
    most, kept = session.load().config.max_positions, session.arguments.kept
    lengths = [length for i in range(32) if (length := 4 * kept << i) <= most]
    if not lengths:
        raise InputError(f"--kept {kept}: the model has only {most} positions; lower it")
    return lengths


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
