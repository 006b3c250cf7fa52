"""Markdown tables from JSON results.

`entry_table` has one row for each entry of a list. `result_table` looks up each cell in result
files of `infinigen_jax.evaluate`: row and column together determine a file, a line and a value.
"""

import functools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]
Spec = Mapping[str, Any]
Titled = Sequence[tuple[str, Spec]]
# Spec keys that are not settings.
KEYS = ("result", "model", "text", "policy", "show", "against")
# Formats of cells, and factors of the values in them.
CELLS = {
    "above": "{perplexity_change_percent:+.2f} ({difference_standard_error:.2f})",
    "divergence": "{divergence_nats:.2f} ({divergence_standard_error:.2f})",
    "fetched": "{fetched_fraction:.1f} %",
    "size": "{relative_kv_size:.1f} %",
    "index": "{device_index_bytes:.1f}",
    "of oracle": "{of_oracle:.1f}",
    "error": "{error:.3f}",
    "accuracy": "{accuracy:.0f}",
}
SCALES = {
    **dict.fromkeys(("difference_standard_error", "fetched_fraction", "relative_kv_size"), 100),
    **dict.fromkeys(("of_oracle", "accuracy"), 100),
    **dict.fromkeys(("divergence_nats", "divergence_standard_error"), 1000),
    "device_index_bytes": 2**-20,
}


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
            likewise of `text`; `show` is one of CELLS, or "between", the change from the line with
            the settings of `against`. All other entries are settings that the line must have, and
            `reference`, for the full cache that the others are compared with.
    """
    cells = [[title, *(_cell(folder, {**c, **row}) for _, c in columns)] for title, row in rows]
    return markdown([corner, *(title for title, _ in columns)], cells)


def _cell(folder: Path, spec: Spec) -> str:
    lines = read(folder, spec["result"].format(**spec))
    settings = {name: value for name, value in spec.items() if name not in KEYS}
    line = find(lines, spec["policy"], settings)
    if line is None:
        return ""
    if (show := spec.get("show", "above")) == "between":
        return _between(line, find(lines, spec["policy"], settings | spec["against"]))
    scaled = {k: scale * line[k] for k, scale in SCALES.items() if line.get(k) is not None}
    return CELLS[show].format_map({**line, **scaled})


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


def _between(line: Line, other: Line | None) -> str:
    """Format perplexity above another line's, with its standard error over pairs of windows."""
    if other is None or other is line:
        return ""
    change = 100 * (line["perplexity"] / other["perplexity"] - 1)
    pairs = zip(line["window_nats"], other["window_nats"], strict=True)
    error = 100 * statistics.stdev(a - b for a, b in pairs) / len(line["window_nats"]) ** 0.5
    return f"{change:+.2f} ({error:.2f})"
