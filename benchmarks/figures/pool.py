"""Limits of the host pool, by what gives way (the paper's table 2).

Perplexity with all of the cache on the host, and with a share of it, evicting the oldest rows,
those least recently requested, or those with the fewest requests. The context is short, so that
most of a window is decoded while rows give way.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks.figures.common import add_options as add_evaluation_options
from benchmarks.figures.common import finish, measure, over
from infinigen_jax.cache.pool import POOL_EVICTIONS
from infinigen_jax.evaluation.plots import Panel
from infinigen_jax.evaluation.session import Session

SUMMARY = "limits of the host pool (table 2)"
MADE_OTHER = ("pool", "tail_tokens", "tail_columns")  # settings that a limit changes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this figure."""
    add_evaluation_options(
        parser,
        tasks=False,
        policy=["infinigen"],
        budget=[0.1],
        context=64,
        pool_tokens=["all", "80%", "60%"],
        pool_eviction=list(POOL_EVICTIONS),
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Measure, print the table and write the files."""
    made = measure(arguments, Session.of(arguments, say))
    unlimited = {
        without_pool(line): line for line in made.lines if line["settings"]["pool"] == "all"
    }
    for line in made.lines:
        whole = unlimited.get(without_pool(line))
        line["change_by_pool_percent"] = None if whole is None else change(line, whole)
    panel = Panel(
        "rows on the host, % of the context",
        "perplexity above the unlimited pool's, %",
        over(made.lines, eviction, limit, "change_by_pool_percent"),
    )
    finish(made, "table 2", [panel], head=["by the pool"], cells=cells)


def cells(line: dict[str, Any]) -> list[str]:
    """The change by the pool alone."""
    change = line["change_by_pool_percent"]
    return ["" if change is None or line["settings"]["pool"] == "all" else f"{change:+.3f} %"]


def without_pool(line: dict[str, Any]) -> str:
    """What a line has in common with the same measurement without a limit.

    A pool has no tail in blocks, nor values predicted in it, so that the change by the pool is also
    that of the tail.
    """
    rest = {k: v for k, v in line["settings"].items() if k not in MADE_OTHER}
    return json.dumps([line["policy"], rest], sort_keys=True)


def change(line: dict[str, Any], unlimited: dict[str, Any]) -> float:
    """Perplexity above that of the same policy without a limit, in percent."""
    return 100 * (line["perplexity"] / unlimited["perplexity"] - 1)


def eviction(line: dict[str, Any]) -> str | None:
    """What gives way; None without a limit, or with one in tokens."""
    words = line["settings"]["pool"].split()
    return words[1] if words[0].endswith("%") else None


def limit(line: dict[str, Any]) -> float:
    """The share of the context, in percent."""
    return float(line["settings"]["pool"].split()[0].rstrip("%"))
