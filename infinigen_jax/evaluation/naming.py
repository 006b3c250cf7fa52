"""What tells the lines of a result apart: columns of the table, and names in a diagram.

A policy's name stands for its defaults, so a setting tells lines apart only where lines of one
policy differ in it.
"""

from collections.abc import Sequence
from typing import Any

# What the query that rows are chosen by may determine.
IMPLIED = {"speculate_from": "query"}
COLUMNS = {"index_dtype": "index", "partial_ratio": "columns", "dense_layers": "dense"}


def distinguishing(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Settings in which lines of the same policy differ, the budget apart.

    Args:
        lines: of a result, each with `policy` and `settings`.
    """
    found: dict[str, None] = {}
    for policy in dict.fromkeys(line["policy"] for line in lines):
        own = [line["settings"] for line in lines if line["policy"] == policy]
        for name in own[0]:
            if name != "budget" and any(s[name] != own[0][name] for s in own):
                found.setdefault(name)
    return list(found)


def name_columns(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The head of the columns that name a line, and their cells for each line."""
    settings = distinguishing(lines)
    head = ["policy", "budget", *(COLUMNS.get(s, s.replace("_", " ")) for s in settings)]
    cells = [
        [line["policy"], *(_cell(line["settings"].get(s)) for s in ("budget", *settings))]
        for line in lines
    ]
    return head, cells


def labels(lines: Sequence[dict[str, Any]]) -> list[str]:
    """A name for each line, in a legend; with its budget, unless all have the same."""
    budgets = {line["settings"]["budget"] for line in lines if "budget" in line["settings"]}
    return _labels(lines, [*(["budget"] if len(budgets) > 1 else []), *distinguishing(lines)])


def labels_over_budgets(lines: Sequence[dict[str, Any]]) -> list[str]:
    """As `labels`, the same for lines that differ in the budget alone."""
    return _labels(lines, distinguishing(lines))


def _labels(lines: Sequence[dict[str, Any]], settings: list[str]) -> list[str]:
    settings, made = [s for s in settings if not _implied(lines, s, settings)], []
    for line in lines:
        values = [(s, line["settings"][s]) for s in settings if s in line["settings"]]
        made.append(" ".join([line["policy"], *(_word(s, value) for s, value in values)]))
    return made


def _implied(lines: Sequence[dict[str, Any]], setting: str, settings: list[str]) -> bool:
    """Whether another setting in a name says this one already."""
    by = IMPLIED.get(setting)
    if by not in settings:
        return False
    found = {(line["settings"].get(by), line["settings"].get(setting)) for line in lines}
    return len(found) == len({value for value, _ in found})


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def _word(setting: str, value: Any) -> str:
    """A value that its line's name is followed by."""
    name = COLUMNS.get(setting, setting.replace("_", " "))
    if isinstance(value, bool):
        return name if value else f"no {name}"
    own = setting in ("budget", "rows", "count", "basis", "query")
    return _cell(value) if own else f"{name} {_cell(value)}"
