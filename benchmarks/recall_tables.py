"""Tables of the attention that each policy finds, out of the results of `evaluate recall`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table_cells import AHEAD, BUDGETS, POLICIES, SEEN, Line, find, markdown, read

SHARES = ("top_k_recall", "mass", "of_oracle")


def recall_table(folder: Path, model: str) -> str:
    """Recall, mass, mass over the oracle's, error of the output, at both budgets."""
    lines = read(folder, f"recall-{model}") or []
    names = ("recall", "mass", "of oracle", "error (oracle's)")
    head = ["", *(f"{b:.0%}: {n}".replace("%", " %") for b in BUDGETS for n in names)]
    rows = []
    for title, (policy, settings) in POLICIES.items():
        cells = [title]
        for budget in BUDGETS:
            line = find(lines, policy, dict(settings) | {"budget": budget})
            cells += [f"{100 * line[share]:.1f}" if line else "" for share in SHARES]
            cells.append(f"{line['error']:.3f} ({line['oracle_error']:.3f})" if line else "")
        rows.append(cells)
    return markdown(head, rows)


def common_recall_table(folder: Path) -> str:
    """Of the oracle's mass, in the layers behind the second with equal budgets for all policies."""
    models = ("books-llama", "tiny-llama", "tiny-opt")
    head, rows = [""], []
    for model in models:
        head += [f"{model} 5 %", "10 %"]
    for title, (policy, settings) in POLICIES.items():
        cells = [title]
        for model in models:
            name = "recall-common" if policy == "infinigen" else "recall"
            lines = read(folder, f"{name}-{model}") or []
            for budget in BUDGETS:
                line = find(lines, policy, dict(settings) | {"budget": budget})
                cells.append(f"{of_oracle(line):.1f}" if line else "")
        if policy != "oracle":
            rows.append(cells)
    return markdown(head, rows)


def of_oracle(line: Line) -> float:
    """Share of the mass that exact top-k attends, in %, of all query heads together."""
    return 100 * line["of_oracle"]


def worst_head(layers: Sequence[Line]) -> str:
    """The query head that has least of the oracle's mass, and its layer."""
    found = []
    for layer in layers:
        for head in layer["heads"]:
            pairs = zip(head["mass"], head["oracle_mass"], strict=True)
            found += [(100 * mass / best, layer["layer"]) for mass, best in pairs]
    share, layer = min(found)
    return f"{share:.1f} (layer {layer})"


def lost_table(folder: Path, model: str) -> str:
    """Share of the oracle's mass at the smaller budget, by layer and by position."""
    lines = read(folder, f"recall-{model}") or []
    found = {
        title: find(lines, policy, dict(settings) | {"budget": BUDGETS[0]})
        for title, (policy, settings) in POLICIES.items()
        if policy != "oracle"
    }
    there = {title: line for title, line in found.items() if line}
    if not there:
        return markdown(["", ""], [])
    numbers = sorted({layer["layer"] for line in there.values() for layer in line["layers"]})
    spans = [(chunk["from"], chunk["to"]) for chunk in next(iter(there.values()))["chunks"]]
    head = ["", *(f"layer {n}" for n in numbers), "worst query head"]
    head += [f"{start:,} to {end - 1:,}" for start, end in spans]
    rows = []
    for title, line in there.items():
        layers = {layer["layer"]: f"{of_oracle(layer):.1f}" for layer in line["layers"]}
        cells = [title, *(layers.get(n, "") for n in numbers), worst_head(line["layers"])]
        rows.append([*cells, *(f"{of_oracle(chunk):.1f}" for chunk in line["chunks"])])
    return markdown(head, rows)


def seen_recall_table(folder: Path) -> str:
    """What the corrected query finds, by what it sees."""
    models = ("books-llama", "tiny-llama", "tiny-opt")
    rows = {title: f"recall{name}" for title, name in SEEN.items()}
    head = [""]
    for model in models:
        head += [f"{model}: recall", "of oracle", "error"]
    made = []
    for title, name in rows.items():
        cells = [title]
        for model in models:
            lines = read(folder, f"{name}-{model}") or []
            both = [find(lines, "infinigen", AHEAD | {"budget": b}) for b in BUDGETS]
            cells += [_both(both, "top_k_recall", 100, 1), _both(both, "of_oracle", 100, 1)]
            cells.append(_both(both, "error", 1, 3))
        made.append(cells)
    return markdown(head, made)


def calibration_table(folder: Path) -> str:
    """What calibration at some of the positions costs at others (`benchmarks.calibration`)."""
    path = folder / "calibration-spread.json"
    lines = json.loads(path.read_text())["lines"] if path.exists() else []
    policies = list(dict.fromkeys(line["policy"] for line in lines))
    head = [
        "calibrated at",
        *(f"{policy}: {n}" for policy in policies for n in ("recall", "of oracle", "error")),
    ]
    rows = []
    for way in dict.fromkeys(line["calibration"] for line in lines):
        cells = [way]
        for line in (x for x in lines if x["calibration"] == way):
            shares = (f"{100 * line[name]:.1f}" for name in ("top_k_recall", "of_oracle"))
            cells += [*shares, f"{line['error']:.3f}"]
        rows.append(cells)
    return markdown(head, rows)


def _both(lines: Sequence[Line | None], name: str, factor: float, digits: int) -> str:
    """A number at either budget."""
    numbers: list[Any] = [line and line[name] for line in lines]
    return " / ".join(f"{factor * x:.{digits}f}" for x in numbers if x is not None)
