"""With and without skewing (the paper's figure 13): bases, over the share of columns.

The paper's settings but for alpha, which leaves the choice to the budget: 20 % of the rows, chosen
by a share of the columns. `none`: the keys' own columns, those with the longest calibration queries
first; `svd`: the paper's basis; `balanced`: this package's. The model must have been converted with
`--skew balanced`, which stores what all three take.
"""

import argparse
from collections.abc import Callable

from benchmarks.figures.common import add_options as add_evaluation_options
from benchmarks.figures.common import finish, level, measure, nothing, over
from infinigen_jax.evaluation.plots import Panel
from infinigen_jax.evaluation.session import Session

SUMMARY = "with and without skewing (figure 13)"
BASES = ("none", "svd", "balanced")
RATIOS = (0.1, 0.2, 0.3, 0.5, 1.0)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this figure."""
    add_evaluation_options(
        parser,
        data=True,
        policy=["infinigen-paper:alpha=inf,budget=0.2"],
        basis=list(BASES),
        partial_ratio=list(RATIOS),
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Measure, print the table and write the files."""
    made = measure(arguments, Session.of(arguments, say))
    lines = level(made.lines, made.quality, arguments.partial_ratio) | over(
        made.lines,
        lambda line: line["settings"].get("basis"),
        lambda line: line["settings"]["partial_ratio"],
        made.quality,
    )
    panel = Panel("columns in the index, share", made.title, lines)
    finish(made, "figure 13", [panel], head=[], cells=nothing)
