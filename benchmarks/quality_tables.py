"""Tables in the documentation, out of the results of `benchmarks.quality`.

A table stands between the comments `<!-- table: NAME -->` and `<!-- end -->`.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figure_tables import FIGURE_TABLES
from benchmarks.recall_tables import lost_table, recall_table, seen_recall_table
from benchmarks.table_cells import (
    AHEAD,
    ALL,
    BUDGETS,
    DEFAULT,
    OWN,
    POLICIES,
    SEEN,
    STEPS,
    Line,
    above,
    apart,
    fetched,
    find,
    markdown,
    pool_change,
    read,
)

Cell = Callable[[Line | None], str]
MODELS = ("books-llama", "tiny-llama", "tiny-opt", "stories260k")
WHOLE_BUDGETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "infinigen, own query, no alpha": ("infinigen", OWN | ALL),
    "infinigen, corrected query, no alpha": ("infinigen", AHEAD | ALL),
}
TAILS = {
    "**as by default**: alpha 4, blocks of 64, 8 columns": {},
    "16 columns": {"tail_columns": 16},
    "no columns": {"tail_columns": 0},
    "blocks of 16, 8 columns": {"tail_tokens": 16},
    "a value for each token": {"tail_tokens": 1},
    "one mean for all": {"tail_tokens": 0},
    "no tail": {"tail": False},
    "alpha 5": {"alpha": 5.0},
    "no alpha": {"alpha": "inf"},
}
BOOK_POLICIES = ("infinigen", "quest", "h2o", "window", "previous-query")
DOCS = Path(__file__).resolve().parent.parent / "docs"
PLACE = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def measured_models(folder: Path, name: str) -> dict[str, list[Line]]:
    """The results that are there, by model."""
    results = {model: read(folder, f"{name}-{model}") for model in MODELS}
    return {model: lines for model, lines in results.items() if lines}


def by_model(
    folder: Path,
    name: str,
    rows: Mapping[str, tuple[str, Mapping[str, Any]]],
    traffic: Mapping[str, tuple[str, Mapping[str, Any]]],
    quality: Cell = above,
) -> str:
    """Quality of rows, in two columns for each model that has been measured.

    Args:
        traffic: further rows, of what is fetched.
        quality: what is shown of it.
    """
    measured = measured_models(folder, name)
    head = [""]
    for model in measured:
        head += [f"{model} 5 %", "10 %"]

    def row(title: str, cell: Cell, which: Any) -> list[str]:
        policy, settings = which
        cells = [title]
        for lines in measured.values():
            for budget in BUDGETS:
                cells.append(cell(find(lines, policy, dict(settings) | {"budget": budget})))
        return cells

    made = [row(title, quality, which) for title, which in rows.items()]
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


def divergence_table(folder: Path) -> str:
    """How far all policies' predictions are from the full cache's, with their default memory."""
    rows = {**POLICIES, **WHOLE_BUDGETS}
    return by_model(folder, "perplexity", rows, {}, apart)


def books_table(folder: Path, quality: Cell = above, result: str = "perplexity-books") -> str:
    """The policies on windows of many books, at equal memory."""
    rows = {name: which for name, which in POLICIES.items() if which[0] in BOOK_POLICIES}
    return by_model(folder, result, rows, {}, quality)


def equal_memory_table(folder: Path, ahead: bool = False, quality: Cell = above) -> str:
    """All policies, with the device memory that InfiniGen takes."""
    names = ("quest", "h2o", "window", "previous-query")
    rows = {"**infinigen**": ("infinigen", {})} | {name: (name, {}) for name in names}
    result = "perplexity-equal-memory" + ("-ahead" if ahead else "")
    return by_model(folder, result, rows, {}, quality)


def tail_table(folder: Path, quality: Cell = above) -> str:
    """Forms of the tail; by the layer's own query."""
    usual = {"tail": True, "tail_tokens": 64, "tail_columns": 8, "alpha": 4.0}

    def which(changes: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        settings = usual | dict(changes)
        if not settings["tail"]:
            settings = {"tail": False}
        elif settings["tail_tokens"] <= 1:
            del settings["tail_columns"]  # they have none, whatever is asked for
        return "infinigen", settings

    rows = {title: which(changes) for title, changes in TAILS.items()}
    chosen = {"as by default": "**as by default**: alpha 4, blocks of 64, 8 columns"}
    chosen |= {title: title for title in ("alpha 5", "no alpha")}
    traffic = {f"fetched, {title}": rows[row] for title, row in chosen.items()}
    return by_model(folder, "perplexity-tail", rows, traffic if quality is above else {}, quality)


def alphas_ahead_table(folder: Path) -> str:
    """Alpha where rows are chosen by the corrected query."""
    rows = {f"alpha {alpha:g}": ("infinigen", {"alpha": alpha}) for alpha in (4.0, 5.0)}
    traffic = {f"fetched, {title}": which for title, which in rows.items()}
    return by_model(folder, "perplexity-alpha-ahead", rows, traffic)


def columns_table(folder: Path) -> str:
    """An index of fewer columns; by the layer's own query."""
    titles = {
        "all columns": 1.0,
        "three quarters, the default": 0.75,
        "half": 0.5,
        "a quarter": 0.25,
    }
    rows = {title: ("infinigen", {"partial_ratio": ratio}) for title, ratio in titles.items()}
    traffic = {f"fetched, {title}": which for title, which in rows.items()}
    return by_model(folder, "perplexity-columns", rows, traffic)


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


PARTS: Mapping[str, Mapping[str, Any]] = {
    "**as by default** on a CPU": {},
    "index in int8": {"index_dtype": "int8"},
    "count fixed": {"count": "fixed"},
    "count pooled": {"count": "pooled"},
    "count top-p, 0.9": {"count": "top-p"},
    "count mean": {"count": "mean"},
    "basis svd": {"basis": "svd"},
    "plain query, a layer ahead": {"query": "plain"},
    "corrected query, a layer ahead": {"query": "corrected"},
}


def parts_table(folder: Path) -> str:
    """The default with one part changed, and what is fetched."""
    usual = {"index_dtype": "int4", "count": "head", "basis": "auto", "query": "own"}
    rows = {title: usual | dict(change) for title, change in PARTS.items()}
    return beside(folder, "perplexity-parts", rows)


def steps_table(folder: Path, quality: Cell = above) -> str:
    """From the paper's form to the default, each line with one part more changed."""
    rows = {title: ("infinigen", step) for title, step in STEPS.items()}
    return by_model(folder, "perplexity-steps", rows, {}, quality)


def rows_table(folder: Path) -> str:
    """Rows on the host in fewer bits, of the full cache and of the default."""
    kinds = ("exact", "int8", "int4")
    head, made = [""], [[f"infinigen, {kind} rows"] for kind in kinds]
    made += [[f"full cache, {kind} rows"] for kind in kinds]
    for model, lines in measured_models(folder, "perplexity-rows").items():
        head.append(model)
        for cells, (policy, kind) in zip(
            made, [(x, kind) for x in ("infinigen", "full") for kind in kinds], strict=True
        ):
            cells.append(above(find(lines, policy, {"rows": kind})))
    return markdown(head, made)


def beside(folder: Path, name: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Perplexity of InfiniGen and the rows fetched, for each model that has been measured."""
    head, made = [""], [[title] for title in rows]
    for model, lines in measured_models(folder, name).items():
        head += [model, "fetched"]
        for cells, settings in zip(made, rows.values(), strict=True):
            line = find(lines, "infinigen", settings)
            cells += [above(line), fetched(line)]
    return markdown(head, made)


LEADS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "corrected query, one layer ahead": ("perplexity-steps", [*STEPS.values()][-1]),
    **{
        f"{query} query, {'one layer' if layers == 1 else 'two layers'} ahead": (
            "perplexity-two-ahead",
            {"query": query, "layers_ahead": layers},
        )
        for query, layers in (("corrected", 2), ("plain", 1), ("plain", 2))
    },
}


def leads_table(folder: Path) -> str:
    """Rows requested one and two layers ahead; a corrected query takes a conversion for each."""
    return by_result(folder, LEADS)


def seen_table(folder: Path, quality: Cell = above) -> str:
    """By what a query ahead sees."""
    rows = {title: (f"perplexity{name}", AHEAD | DEFAULT) for title, name in SEEN.items()}
    return by_result(folder, rows, quality)


def by_result(
    folder: Path, rows: Mapping[str, tuple[str, Mapping[str, Any]]], quality: Cell = above
) -> str:
    """InfiniGen in two columns for each model; each row of another result."""
    head, made = [""], [[title] for title in rows]
    for model in MODELS[:3]:
        head += [f"{model} 5 %", "10 %"]
        for cells, (name, settings) in zip(made, rows.values(), strict=True):
            lines = read(folder, f"{name}-{model}") or []
            for budget in BUDGETS:
                cells.append(quality(find(lines, "infinigen", {**settings, "budget": budget})))
    return markdown(head, made)


POOLS = [f"{share} {order}" for share in ("80%", "50%") for order in ("counter", "lru", "fifo")]


def pool_table(folder: Path) -> str:
    """Perplexity above that of InfiniGen without a limit, and above the full cache's."""
    measured = measured_models(folder, "perplexity-pool")
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
    measured = measured_models(folder, "perplexity-pool")
    rows = []
    for pool in POOLS:
        changes = [pool_change(lines, pool, last=True) for lines in measured.values()]
        cells = [pool.replace("%", " %"), *("" if x is None else f"{x:+.2f}" for x in changes)]
        rows.append(cells)
    return markdown(["pool", *measured], rows)


TABLES: Mapping[str, Callable[[Path], str]] = {
    "perplexity": perplexity_table,
    "divergence": divergence_table,
    "books": books_table,
    "books divergence": lambda folder: books_table(folder, apart),
    "none dense": lambda folder: books_table(folder, above, "perplexity-none-dense"),
    "none dense divergence": lambda folder: books_table(folder, apart, "perplexity-none-dense"),
    "equal memory": equal_memory_table,
    "equal memory ahead": lambda folder: equal_memory_table(folder, ahead=True),
    "equal memory divergence": lambda folder: equal_memory_table(folder, quality=apart),
    "equal memory ahead divergence": lambda folder: equal_memory_table(folder, True, apart),
    "tail": tail_table,
    "tail divergence": lambda folder: tail_table(folder, apart),
    "alphas ahead": alphas_ahead_table,
    "columns": columns_table,
    "layer budgets": layer_budgets_table,
    "parts": parts_table,
    "steps": steps_table,
    "steps divergence": lambda folder: steps_table(folder, apart),
    "rows": rows_table,
    "pool": pool_table,
    "pool end": pool_end_table,
    "leads": leads_table,
    "seen": seen_table,
    "seen divergence": lambda folder: seen_table(folder, apart),
    "seen recall": seen_recall_table,
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
