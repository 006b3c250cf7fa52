"""Tables in the documentation, out of the results of `benchmarks.quality`.

A table stands between the comments `<!-- table: NAME -->` and `<!-- end -->`.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figure_tables import FIGURE_TABLES
from benchmarks.recall_tables import behind_recall_table, lost_table, recall_table
from benchmarks.table_cells import (
    AHEAD,
    ALL,
    BUDGETS,
    DEFAULT,
    OWN,
    POLICIES,
    Line,
    above,
    fetched,
    find,
    markdown,
    pool_change,
    read,
)

MODELS = ("books-llama", "tiny-llama", "tiny-opt", "stories260k")
WHOLE_BUDGETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "infinigen, own query, no alpha": ("infinigen", OWN | ALL),
    "infinigen, corrected query, no alpha": ("infinigen", AHEAD | ALL),
}
TAILS = {
    "**as by default** but alpha 5: blocks of 64, 8 columns": {},
    "16 columns": {"tail_columns": 16},
    "no columns": {"tail_columns": 0},
    "blocks of 16, 8 columns": {"tail_tokens": 16},
    "a value for each token": {"tail_tokens": 1},
    "one mean for all": {"tail_tokens": 0},
    "no tail": {"tail": False},
    "alpha 4, the default": {"alpha": 4.0},
    "no alpha": {"alpha": "inf"},
}
DOCS = Path(__file__).resolve().parent.parent / "docs"
PLACE = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def by_model(
    folder: Path,
    name: str,
    rows: Mapping[str, tuple[str, Mapping[str, Any]]],
    traffic: Mapping[str, tuple[str, Mapping[str, Any]]],
) -> str:
    """Perplexity of rows, in two columns for each model that has been measured.

    Args:
        traffic: further rows, of what is fetched.
    """
    results = {model: read(folder, f"{name}-{model}") for model in MODELS}
    measured = {model: lines for model, lines in results.items() if lines}
    head = [""]
    for model in measured:
        head += [f"{model} 5 %", "10 %"]

    def row(title: str, cell: Callable[[Line | None], str], which: Any) -> list[str]:
        policy, settings = which
        cells = [title]
        for lines in measured.values():
            for budget in BUDGETS:
                cells.append(cell(find(lines, policy, dict(settings) | {"budget": budget})))
        return cells

    made = [row(title, above, which) for title, which in rows.items()]
    made += [row(f"*{title}*", fetched, which) for title, which in traffic.items()]
    return markdown(head, made)


def perplexity_table(folder: Path) -> str:
    """All policies, with their default memory."""
    names = list(POLICIES)
    order = (*names[:2], *WHOLE_BUDGETS, *names[2:])
    rows = {name: {**POLICIES, **WHOLE_BUDGETS}[name] for name in order}
    traffic = {
        "fetched by infinigen, own query": ("infinigen", OWN | DEFAULT),
        "the same, no alpha": ("infinigen", OWN | ALL),
    }
    return by_model(folder, "perplexity", rows, traffic)


def equal_memory_table(folder: Path) -> str:
    """All policies, with the device memory that InfiniGen takes."""
    names = ("quest", "h2o", "window", "previous-query")
    rows = {"**infinigen**": ("infinigen", {})} | {name: (name, {}) for name in names}
    return by_model(folder, "perplexity-equal-memory", rows, {})


def tail_table(folder: Path) -> str:
    """Forms of the tail; by the layer's own query."""
    usual = {"tail": True, "tail_tokens": 64, "tail_columns": 8, "alpha": 5.0}

    def which(changes: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        settings = usual | dict(changes)
        if not settings["tail"]:
            settings = {"tail": False}
        elif settings["tail_tokens"] <= 1:
            del settings["tail_columns"]  # they have none, whatever is asked for
        return "infinigen", settings

    rows = {title: which(changes) for title, changes in TAILS.items()}
    chosen = {"alpha 5": "**as by default** but alpha 5: blocks of 64, 8 columns"}
    chosen |= {title: title for title in ("alpha 4, the default", "no alpha")}
    traffic = {f"fetched, {title}": rows[row] for title, row in chosen.items()}
    return by_model(folder, "perplexity-tail", rows, traffic)


def alphas_ahead_table(folder: Path) -> str:
    """Alpha where rows are chosen by the corrected query."""
    rows = {f"alpha {alpha:g}": ("infinigen", {"alpha": alpha}) for alpha in (4.0, 5.0)}
    traffic = {f"fetched, {title}": which for title, which in rows.items()}
    return by_model(folder, "perplexity-alpha-ahead", rows, traffic)


def layer_budgets_table(folder: Path) -> str:
    """Equal budgets of all layers against calibrated ones."""
    rows = {
        f"{'own query (CPU)' if query is OWN else 'corrected query (GPU)'}, {kind}": (
            "infinigen",
            {**query, "layer_budgets": kind},
        )
        for query in (OWN, AHEAD)
        for kind in ("equal", "calibrated")
    }
    traffic = {f"fetched, {kind}": ("infinigen", OWN | {"layer_budgets": kind})
               for kind in ("equal", "calibrated")}  # fmt: skip
    return by_model(folder, "perplexity-layer-budgets", rows, traffic)


LEADS: Mapping[str, tuple[str, str, int]] = {
    "corrected query, one layer ahead": ("one-ahead", "corrected", 1),
    "corrected query, two layers ahead": ("two-ahead", "corrected", 2),
    "plain query, one layer ahead": ("two-ahead", "plain", 1),
    "plain query, two layers ahead": ("two-ahead", "plain", 2),
}


def leads_table(folder: Path) -> str:
    """Rows requested one and two layers ahead; a corrected query takes a conversion for each."""
    rows = {}
    for title, (name, query, layers) in LEADS.items():
        rows[title] = (f"perplexity-{name}", {"query": query, "layers_ahead": layers})
    return by_result(folder, rows)


def behind_table(folder: Path) -> str:
    """By a layer's input, and by the state behind its attention."""
    rows = {"input": "perplexity", "behind the attention": "perplexity-behind"}
    return by_result(folder, {title: (name, AHEAD | DEFAULT) for title, name in rows.items()})


def by_result(folder: Path, rows: Mapping[str, tuple[str, Mapping[str, Any]]]) -> str:
    """Perplexity of InfiniGen, in two columns for each model; each row of another result."""
    head, made = [""], [[title] for title in rows]
    for model in MODELS[:3]:
        head += [f"{model} 5 %", "10 %"]
        for cells, (name, settings) in zip(made, rows.values(), strict=True):
            lines = read(folder, f"{name}-{model}") or []
            for budget in BUDGETS:
                cells.append(above(find(lines, "infinigen", {**settings, "budget": budget})))
    return markdown(head, made)


POOLS = [f"{share} {order}" for share in ("80%", "50%") for order in ("counter", "lru", "fifo")]


def pool_results(folder: Path) -> dict[str, list[Line]]:
    """The results with a limited pool, by model."""
    results = {model: read(folder, f"perplexity-pool-{model}") for model in MODELS}
    return {model: lines for model, lines in results.items() if lines}


def pool_table(folder: Path) -> str:
    """Perplexity above that of InfiniGen without a limit, and above the full cache's."""
    measured = pool_results(folder)
    rows = []
    for pool in ("all", *POOLS):
        cells = [pool.replace("%", " %") if pool != "all" else "none"]
        for lines in measured.values():
            change, line = pool_change(lines, pool), find(lines, "infinigen", {"pool": pool})
            if change is None or line is None:
                cells.append("")
                continue
            beyond = f"({line['perplexity_change_percent']:+.2f})"
            cells.append(f"{change:+.2f} {beyond}" if pool != "all" else f"– {beyond}")
        rows.append(cells)
    for share in ("80%", "50%"):
        cells = [f"*full cache, {share.replace('%', ' %')}*"]
        for lines in measured.values():
            line = find(lines, "full", {"pool": f"{share} fifo"})
            cells.append(f"*{line['perplexity_change_percent']:+.2f}*" if line else "")
        rows.append(cells)
    return markdown(["pool", *measured], rows)


def pool_end_table(folder: Path) -> str:
    """Above InfiniGen without a limit in the last chunk of the windows alone."""
    measured = pool_results(folder)
    rows = []
    for pool in POOLS:
        changes = [pool_change(lines, pool, last=True) for lines in measured.values()]
        cells = [pool.replace("%", " %"), *("" if x is None else f"{x:+.2f}" for x in changes)]
        rows.append(cells)
    return markdown(["pool", *measured], rows)


TABLES: Mapping[str, Callable[[Path], str]] = {
    "perplexity": perplexity_table,
    "equal memory": equal_memory_table,
    "tail": tail_table,
    "alphas ahead": alphas_ahead_table,
    "layer budgets": layer_budgets_table,
    "pool": pool_table,
    "pool end": pool_end_table,
    "leads": leads_table,
    "behind": behind_table,
    "behind recall": behind_recall_table,
    "lost tiny-llama": lambda folder: lost_table(folder, "tiny-llama"),
    "lost tiny-opt": lambda folder: lost_table(folder, "tiny-opt"),
    "lost books-llama": lambda folder: lost_table(folder, "books-llama"),
    "recall books-llama": lambda folder: recall_table(folder, "books-llama"),
    "recall tiny-llama": lambda folder: recall_table(folder, "tiny-llama"),
    "recall tiny-opt": lambda folder: recall_table(folder, "tiny-opt"),
    **FIGURE_TABLES,
}


def with_tables(text: str, folder: Path) -> str:
    """A document with its tables made again."""
    return PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]](folder)}\n{found[4]}", text)


def write_tables(folder: Path) -> None:
    """Make the documentation's tables again."""
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        if (made := with_tables(text, folder)) != text:
            path.write_text(made)
