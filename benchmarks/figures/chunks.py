"""Perplexity by position: full cache, InfiniGen and H2O at the same KV size (figure 12).

Rows that are dropped permanently are missed more and more as the text continues; rows that stay on
the host are not.
"""

import argparse
from collections.abc import Callable
from typing import Any

from benchmarks.figures.common import add_evaluation_options, finish, measure
from benchmarks.plots import Panel
from infinigen_jax.evaluation.report import labels
from infinigen_jax.evaluation.session import Session

SUMMARY = "perplexity by position, against H2O (figure 12)"


def add_options(parser: argparse.ArgumentParser) -> None:
    add_evaluation_options(
        parser,
        tasks=False,
        policy=["infinigen:window=32", "infinigen-paper", "h2o:window=32", "window:window=32"],
        budget=[0.05],
        context=64,
        chunk=128,
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    session = Session(arguments, say)
    lines, _ = measure(session)
    named = list(zip(labels(lines), lines, strict=True))

    def points(value: str) -> dict[str, list[Any]]:
        return {
            label: [(c["to"], c[value]) for c in line["chunks"] if c[value] is not None]
            for label, line in named
        }

    changes = points("perplexity_change_percent")
    panels = [
        Panel("position, tokens", "perplexity", points("perplexity")),
        Panel("position, tokens", "perplexity above the full cache's, %", changes),
    ]
    ends = [chunk["to"] for chunk in lines[0]["chunks"]]
    finish(session, lines, "figure 12", panels, [f"to {end}" for end in ends], chunk_cells)


def chunk_cells(line: dict[str, Any]) -> list[str]:
    """Return the perplexity of each chunk, or its difference from the full cache's."""
    return [
        f"{chunk['perplexity']:.3f}"
        if chunk["perplexity_change_percent"] is None
        else f"{chunk['perplexity_change_percent']:+.2f} %"
        for chunk in line["chunks"]
    ]
