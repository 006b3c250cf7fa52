"""What tables of results are made of: lines found by their settings, cells, Markdown."""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
BUDGETS = (0.05, 0.1)
OWN, AHEAD = {"query": "own"}, {"query": "corrected"}
DEFAULT, ALL = {"alpha": 4.0}, {"alpha": "inf"}
# What a row of the tables of policies is called, and which line of a result it is.
POLICIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "**infinigen**, own query (CPU)": ("infinigen", OWN | DEFAULT),
    "**infinigen**, corrected query, a layer ahead (GPU)": ("infinigen", AHEAD | DEFAULT),
    "infinigen-paper": ("infinigen-paper", {}),
    "quest": ("quest", {}),
    "h2o": ("h2o", {}),
    "window": ("window", {}),
    "previous-query": ("previous-query", {}),
    "oracle (study)": ("oracle", {}),
}
# What a query ahead sees, and the end of the name of its results.
SEEN: Mapping[str, str] = {
    "input": "-input-no-neurons",
    "input, neurons": "-input",
    "behind what is resident": "-no-neurons",
    "**behind what is resident, neurons**": "",
    "behind the attention, neurons": "-behind",
}
# From the paper's form to the default, looking ahead with two dense layers: what each step changes
# of the one before.
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "the paper's": {
        **{"sinks": 0, "window": 1, "count": "mean", "index_dtype": "auto", "partial_ratio": 0.3},
        **{"basis": "svd", "query": "plain", "speculate_from": "input", "layers_ahead": 1},
        **{"layer_budgets": "equal", "tail": False},
    },
    "4 sinks and 32 recent tokens resident": {"sinks": 4, "window": 32},
    "a count for each KV head": {"count": "head"},
    "index of three quarters in int4": {"index_dtype": "int4", "partial_ratio": 0.75},
    "balanced basis": {"basis": "balanced"},
    "query corrected, behind what is resident": {
        **{"query": "corrected", "speculate_from": "resident"},
    },
    "tail, one mean for all": {"tail": True, "tail_tokens": 0},
    "tail in blocks, by the layer's own query": {"tail_tokens": 64, "tail_columns": 0},
    "values predicted within blocks": {"tail_columns": 8},
    "**budgets by layer: the default**": {"layer_budgets": "calibrated"},
}
STEPS: Mapping[str, Mapping[str, Any]] = dict(
    zip(_CHANGES, itertools.accumulate(_CHANGES.values(), lambda a, b: {**a, **b}), strict=True)
)


def read(folder: Path, name: str) -> list[Line] | None:
    """The lines of a result, if it is there."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["configurations"] if path.exists() else None


def find(lines: Sequence[Line], policy: str, settings: Mapping[str, Any]) -> Line | None:
    """The line of a policy that has these settings, if there is one.

    Raises:
        ValueError: if there are several.
    """
    found = [
        line
        for line in lines
        if line["policy"] == policy
        and not line["reference"]
        and all(line["settings"].get(key) == value for key, value in settings.items())
    ]
    if len(found) > 1:
        raise ValueError(f"{len(found)} lines of {policy} with {dict(settings)}")
    return found[0] if found else None


def above(line: Line | None) -> str:
    """Perplexity above the full cache's, in %, and its standard error."""
    if line is None:
        return ""
    error = 100 * line["difference_standard_error"]
    return f"{line['perplexity_change_percent']:+.2f} ({error:.2f})"


def apart(line: Line | None) -> str:
    """Divergence from the full cache's predictions, in thousandths of a nat, and its error."""
    if line is None or "divergence_nats" not in line:
        return ""
    return f"{1e3 * line['divergence_nats']:.2f} ({1e3 * line['divergence_standard_error']:.2f})"


def fetched(line: Line | None) -> str:
    return "" if line is None else f"*{100 * line['fetched_fraction']:.1f} %*"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column of text, without rows that are empty but for it."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows if any(row[1:]))])


def between(line: Line, other: Line) -> str:
    """Perplexity above another line's, in %, and the standard error of that, window by window."""
    change = 100 * (line["perplexity"] / other["perplexity"] - 1)
    if not (line.get("window_nats") and other.get("window_nats")):
        return f"{change:+.2f}"
    pairs = zip(line["window_nats"], other["window_nats"], strict=True)
    differences = [a - b for a, b in pairs]
    error = 100 * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{change:+.2f} ({error:.2f})"


def pool_cell(lines: Sequence[Line], pool: str) -> str:
    """Perplexity with a limited pool above InfiniGen's without one, if both are there."""
    free = find(lines, "infinigen", {"pool": "all"})
    line = find(lines, "infinigen", {"pool": pool})
    return "" if line is None or free is None else between(line, free)


def end_change(lines: Sequence[Line], pool: str) -> float | None:
    """As `pool_cell`, of the last chunk of the windows alone; None if one of them is missing."""
    free = find(lines, "infinigen", {"pool": "all"})
    line = find(lines, "infinigen", {"pool": pool})
    if line is None or free is None:
        return None
    limited, without = (one["chunks"][-1] for one in (line, free))
    return 100 * (limited["perplexity"] / without["perplexity"] - 1)
