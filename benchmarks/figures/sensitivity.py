"""Sensitivity of accuracy to alpha and to the partial ratio (the paper's figure 17).

Both sweeps of the paper, alpha from 1 to 9 and ratios from 0.1 to 1 at alpha 4, with the paper's
settings and with this package's.
"""

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks.figures.common import TITLES, add_evaluation_options, finish, level, measure, over
from benchmarks.plots import Panel
from infinigen_jax.evaluation.session import Session

SUMMARY = "sensitivity to alpha and partial ratio (figure 17)"
ALPHAS = (1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0)
RATIOS = {
    "infinigen-paper": (0.1, 0.2, 0.4, 0.6, 0.8, 1.0),
    # An int4 index has whole words of eight columns, so with heads of 32 only these differ.
    "infinigen": (0.25, 0.5, 0.75, 1.0),
}
ALPHA = 4.0  # for the sweep over ratios
ALPHA_SWEEP_RATIO = {"infinigen-paper": 0.2, "infinigen": 0.75}  # for the sweep over alpha


def add_options(parser: argparse.ArgumentParser) -> None:
    sweeps: dict[str, None] = {}  # the two share a point
    for name, ratio in ALPHA_SWEEP_RATIO.items():
        window = ",window=32" if name == "infinigen" else ""
        pairs = [(alpha, ratio) for alpha in ALPHAS] + [(ALPHA, each) for each in RATIOS[name]]
        for alpha, ratio in pairs:
            sweeps.setdefault(f"{name}:alpha={alpha:g},partial_ratio={ratio:g}{window}")
    add_evaluation_options(parser, tasks=True, policy=list(sweeps), budget=[0.2])


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    session = Session(arguments, say)
    lines, quality = measure(session)
    title = TITLES[quality]
    panels = [
        Panel("alpha", title, sweep(lines, quality, "alpha", ALPHAS)),
        Panel("columns in the index, share", title,
              sweep(lines, quality, "partial_ratio", RATIOS["infinigen-paper"])),
        Panel("alpha", "rows attended to, share",
              sweep(lines, "attended_fraction", "alpha", ALPHAS, full=False)),
    ]  # fmt: skip
    finish(session, lines, "figure 17", panels)


def sweep(
    lines: list[dict[str, Any]], y: str, x: str, values: tuple[float, ...], full: bool = True
) -> dict[str, Any]:
    """Return the points of one of the two sweeps."""

    def name(line: dict[str, Any]) -> str | None:
        settings = line["settings"]
        if not isinstance(settings.get(x), float):  # none, or no limit
            return None
        held = (
            settings["partial_ratio"] == ALPHA_SWEEP_RATIO.get(line["policy"])
            if x == "alpha"
            else settings["alpha"] == ALPHA
        )
        return line["policy"] if held else None

    across = level(lines, y, values) if full else {}
    return across | over(lines, name, lambda line: line["settings"][x], y)
