"""Labels that distinguish the lines of a result, in tables and diagrams.

A policy's name implies its defaults, so a setting distinguishes lines only if lines of one policy
differ in it.
"""

from collections.abc import Sequence
from typing import Any

# Settings that the query for selection may determine.
IMPLIED = {"speculate_from": "query"}
COLUMNS = {"index_dtype": "index", "partial_ratio": "columns", "dense_layers": "dense"}


def distinguishing(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return the settings, except the budget, in which lines of the same policy differ.

    Args:
        lines: lines of a result, with `policy` and `settings`.
    """
    names: dict[str, None] = {}
    for policy in dict.fromkeys(line["policy"] for line in lines):
        settings = [line["settings"] for line in lines if line["policy"] == policy]
        for name in settings[0]:
            if name != "budget" and any(s[name] != settings[0][name] for s in settings):
                names.setdefault(name)
    return list(names)


def name_columns(lines: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the headings of the columns that name a line, and their cells for each line."""
    settings = distinguishing(lines)
    head = ["policy", "budget", *(COLUMNS.get(s, s.replace("_", " ")) for s in settings)]
    cells = [
        [line["policy"], *(_cell(line["settings"].get(s)) for s in ("budget", *settings))]
        for line in lines
    ]
    return head, cells


def labels(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return a legend label for each line, with its budget unless all have the same."""
    budgets = {line["settings"]["budget"] for line in lines if "budget" in line["settings"]}
    return _labels(lines, [*(["budget"] if len(budgets) > 1 else []), *distinguishing(lines)])


def labels_over_budgets(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return labels like `labels`, but equal for lines that differ only in the budget."""
    return _labels(lines, distinguishing(lines))


def _labels(lines: Sequence[dict[str, Any]], settings: list[str]) -> list[str]:
    settings, labels = [s for s in settings if not _implied(lines, s, settings)], []
    for line in lines:
        values = [(s, line["settings"][s]) for s in settings if s in line["settings"]]
        labels.append(" ".join([line["policy"], *(_word(s, value) for s, value in values)]))
    return labels


def _implied(lines: Sequence[dict[str, Any]], setting: str, settings: list[str]) -> bool:
    """Return whether another setting of the name already implies this one."""
    by = IMPLIED.get(setting)
    if by not in settings:
        return False
    pairs = {(line["settings"].get(by), line["settings"].get(setting)) for line in lines}
    return len(pairs) == len({value for value, _ in pairs})


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def _word(setting: str, value: Any) -> str:
    """Format a setting's value for a label."""
    name = COLUMNS.get(setting, setting.replace("_", " "))
    if isinstance(value, bool):
        return name if value else f"no {name}"
    self_explanatory = setting in ("budget", "rows", "count", "basis", "query")
    return _cell(value) if self_explanatory else f"{name} {_cell(value)}"
