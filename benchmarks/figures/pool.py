"""Limits of the host pool by eviction order (the paper's table 2).

Perplexity with the whole cache on the host, and with a share of it, evicting the oldest rows, the
least recently requested, or the least often requested. The context is short, so that rows are
evicted while most of a window is decoded.
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

from benchmarks.figures.common import add_evaluation_options, finish, measure, over
from benchmarks.plots import Panel
from infinigen_jax.evaluation.session import Session
from infinigen_jax.settings.pool import POOL_EVICTIONS

SUMMARY = "limits of the host pool (table 2)"
MADE_OTHER = ("pool", "tail_tokens", "tail_columns")  # settings that a limit changes


def add_options(parser: argparse.ArgumentParser) -> None:
    add_evaluation_options(
        parser,
        tasks=False,
        policy=["infinigen:window=32"],
        budget=[0.1],
        context=64,
        pool_tokens=["all", 0.8, 0.6],
        pool_eviction=list(POOL_EVICTIONS),
    )


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    session = Session(arguments, say)
    lines, _ = measure(session)
    unlimited = {without_pool(line): line for line in lines if line["settings"]["pool"] == "all"}
    for line in lines:
        whole = unlimited.get(without_pool(line))
        change = None if whole is None else 100 * (line["perplexity"] / whole["perplexity"] - 1)
        line["change_by_pool_percent"] = change
    panel = Panel(
        "rows on the host, % of the context",
        "perplexity above the unlimited pool's, %",
        over(lines, eviction, limit, "change_by_pool_percent"),
    )
    finish(session, lines, "table 2", [panel], ["by the pool"], cells)


def cells(line: dict[str, Any]) -> list[str]:
    change = line["change_by_pool_percent"]
    return ["" if change is None or line["settings"]["pool"] == "all" else f"{change:+.3f} %"]


def without_pool(line: dict[str, Any]) -> str:
    """Return a key that equals that of the same measurement without a limit.

    A pool has neither a tail in blocks nor predicted values, so the change caused by a pool
    includes that of the tail.
    """
    rest = {k: v for k, v in line["settings"].items() if k not in MADE_OTHER}
    return json.dumps([line["policy"], rest], sort_keys=True)


def eviction(line: dict[str, Any]) -> str | None:
    """Return the eviction order; None without a limit, or with a limit in tokens."""
    words = line["settings"]["pool"].split()
    return words[1] if words[0].endswith("%") else None


def limit(line: dict[str, Any]) -> float:
    """Return the limit as a share of the context, in percent."""
    return float(line["settings"]["pool"].split()[0].rstrip("%"))
