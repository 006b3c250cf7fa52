"""Quality against relative KV size (the paper's figure 11).

Relative size is the share of cached rows that a step attends to, fetched or resident, in layers
that select rows. Rows in int8 or int4 count by their bytes relative to 16 bits. The figure shows
the paper's InfiniGen at its pairs of alpha and budget, this package's InfiniGen, H2O and the window
at several budgets, and the full cache in smaller rows.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from benchmarks.figures.common import TITLES, add_evaluation_options, finish, level, measure, over
from benchmarks.plots import Panel
from infinigen_jax.cache.row_format import row_format
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.report import percent
from infinigen_jax.evaluation.session import Session

SUMMARY = "quality against relative KV size (figure 11)"
BUDGETS = (0.02, 0.05, 0.1, 0.2, 0.4)
PAPER = ((2, 0.2), (4, 0.2), (5, 0.4), (7, 0.6))  # alpha and budget for OPT-6.7B


def add_options(parser: argparse.ArgumentParser) -> None:
    names = ("infinigen", "h2o", "window")
    policies = [f"{name}:window=32,budget={b}" for name in names for b in BUDGETS]
    policies += [f"infinigen-paper:alpha={a},budget={b}" for a, b in PAPER]
    add_evaluation_options(
        parser, tasks=True, policy=["full", *policies], rows=["auto", "int8", "int4"]
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    session = Session(arguments, say)
    # Smaller rows are an alternative to selection; the figure does not combine them.
    session.chosen = [c for c in session.chosen if c.rows == "auto" or c.policy.name == "full"]
    if not session.chosen:
        raise InputError("--rows: smaller rows are for policy full; add it, or rows auto")
    lines, quality = measure(session)
    head_dim = session.record["model"]["head_dim"]
    for line in lines:
        line["relative_kv_size"] = relative_size(line, head_dim)
    sizes = [100 * line["relative_kv_size"] for line in lines]
    others = [line for line in lines if not line["reference"]]
    curves = level(lines, quality, sizes)
    curves |= over(others, name, lambda line: 100 * line["relative_kv_size"], quality)
    panel = Panel("relative KV size, %", TITLES[quality], curves)
    finish(
        session,
        lines,
        "figure 11",
        [panel],
        ["KV size"],
        lambda line: [percent(line["relative_kv_size"], 1)],
    )


def name(line: dict[str, Any]) -> str:
    """Name a line by its policy if that selects rows; name full caches alike in all formats."""
    return "smaller rows" if line["policy"] == "full" else line["policy"]


def relative_size(line: dict[str, Any], head_dim: int) -> float:
    """Return the bytes attended to over those of the whole cache in 16 bits."""
    rows = line["settings"]["rows"]
    if rows == "exact":
        return line["attended_fraction"]
    bytes_of_row = row_format(rows, jnp.dtype("bfloat16"), head_dim).width
    return line["attended_fraction"] * bytes_of_row / (2 * head_dim * 2)
