"""Markdown tables from JSON results.

`entry_table` has one row for each entry of a list. `result_table` looks up each cell in result
files of `infinigen_jax.evaluate`: row and column together determine a file, a line and a value.
"""

import functools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
Spec = Mapping[str, Any]
Titled = Sequence[tuple[str, Spec]]
# Spec keys that are not settings.
KEYS = ("result", "model", "text", "policy", "show", "against")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table whose first column is text, without rows that are otherwise empty."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows if any(row[1:]))])


def entry_table(columns: Mapping[str, tuple[str, str]], entries: Iterable[Line]) -> str:
    """Format one row for each entry.

    Columns map a title to the key of a value ("a.b" if nested; b may have dots) and its format.
    Missing values leave a cell empty.
    """

    def cell(entry: Line, key: str, pattern: str) -> str:
        value = functools.reduce(lambda x, name: (x or {}).get(name), key.split(".", 1), entry)
        return "" if value is None else pattern.format(value)

    rows = ([cell(entry, *column) for column in columns.values()] for entry in entries)
    return markdown(list(columns), rows)


def result_table(folder: Path, rows: Titled, columns: Titled, corner: str = "") -> str:
    """Format a cell for each row and column, empty if not measured.

    Args:
        rows, columns: title -> lookup; entries of a row override those of a column. Among KEYS,
            `result` is a file name without suffix, in which "{model}" stands for `model`, and
            likewise of `text`; `show` is one of CELLS. All other entries are settings
            that the line must have, and `reference`, for the full cache that the others are
            compared with.
    """
    cells = [[title, *(_cell(folder, {**c, **row}) for _, c in columns)] for title, row in rows]
    return markdown([corner, *(title for title, _ in columns)], cells)


def _cell(folder: Path, spec: Spec) -> str:
    lines = read(folder, spec["result"].format(**spec))
    settings = {name: value for name, value in spec.items() if name not in KEYS}
    line = find(lines, spec["policy"], settings)
    if line is None:
        return ""
    other = find(lines, spec["policy"], settings | spec.get("against", {}))
    return CELLS[spec.get("show", "above")](line, other)


@functools.cache
def read(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines of a result file; empty if it does not exist."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["configurations"] if path.exists() else []


def find(lines: Sequence[Line], policy: str, settings: Mapping[str, Any]) -> Line | None:
    """Return the line of a policy with these settings; None without one, ValueError for several."""
    wanted = {"reference": False, **settings}
    matches = [
        line
        for line in lines
        if line["policy"] == policy
        and all({**line["settings"], **line}.get(k) == v for k, v in wanted.items())
    ]
    if len(matches) > 1:
        raise ValueError(f"{len(matches)} lines of {policy} with {dict(settings)}")
    return matches[0] if matches else None


def _above(line: Line, _: Any) -> str:
    error = 100 * line["difference_standard_error"]
    return f"{line['perplexity_change_percent']:+.2f} ({error:.2f})"


def _divergence(line: Line, _: Any) -> str:
    error = 1e3 * line["divergence_standard_error"]
    return f"{1e3 * line['divergence_nats']:.2f} ({error:.2f})"


def _between(line: Line, other: Line | None) -> str:
    """Format perplexity above another line's, with its standard error over pairs of windows."""
    if other is None or other is line:
        return ""
    change = 100 * (line["perplexity"] / other["perplexity"] - 1)
    pairs = zip(line["window_nats"], other["window_nats"], strict=True)
    error = 100 * statistics.stdev(a - b for a, b in pairs) / len(line["window_nats"]) ** 0.5
    return f"{change:+.2f} ({error:.2f})"


def _percent(name: str, pattern: str = "{:.1f} %") -> Callable[[Line, Any], str]:
    return lambda line, _: pattern.format(100 * line[name])


CELLS: Mapping[str, Callable[[Line, Line | None], str]] = {
    "above": _above,
    "divergence": _divergence,
    "between": _between,
    "fetched": _percent("fetched_fraction"),
    "size": _percent("relative_kv_size"),
    "index": lambda line, _: f"{line['device_index_bytes'] / 2**20:.1f}",
    "of oracle": _percent("of_oracle", "{:.1f}"),
    "error": lambda line, _: f"{line['error']:.3f}",
    "accuracy": _percent("accuracy", "{:.0f}"),
}
