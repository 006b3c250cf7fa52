"""Tables in the documentation, out of the results of `benchmarks.quality`.

A table stands between the comments `<!-- table: NAME -->` and `<!-- end -->`.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figure_tables import FIGURE_TABLES
from benchmarks.quantisation_tables import index_table, speed_table
from benchmarks.quantisation_tables import rows_table as rows_of_formats
from benchmarks.recall_tables import (
    calibration_table,
    common_recall_table,
    lost_table,
    recall_table,
    seen_recall_table,
)
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
    end_change,
    fetched,
    find,
    markdown,
    pool_cell,
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


def layer_budgets_table(folder: Path, quality: Cell = above) -> str:
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
    traffic = traffic if quality is above else {}
    return by_model(folder, "perplexity-layer-budgets", rows, traffic, quality)


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
    """Perplexity, divergence and rows fetched of InfiniGen, for each measured model."""
    head, made = [""], [[title] for title in rows]
    for model, lines in measured_models(folder, name).items():
        head += [model, "divergence", "fetched"]
        for cells, settings in zip(made, rows.values(), strict=True):
            line = find(lines, "infinigen", settings)
            cells += [above(line), apart(line), fetched(line)]
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


def leads_table(folder: Path, quality: Cell = above) -> str:
    """Rows requested one and two layers ahead; a corrected query takes a conversion for each."""
    return by_result(folder, LEADS, quality)


DENSE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    title: (f"perplexity-dense-{layers}", {})
    for layers, title in enumerate(("none", "one layer", "two layers"))
}


def dense_table(folder: Path, quality: Cell = above) -> str:
    """By the number of leading layers that the device keeps in full."""
    return by_result(folder, DENSE, quality)


def seen_table(folder: Path, quality: Cell = above) -> str:
    """By what a query ahead sees."""
    rows = {title: (f"perplexity{name}", AHEAD | DEFAULT) for title, name in SEEN.items()}
    return by_result(folder, rows, quality)


def broken_table(folder: Path, quality: Cell = above) -> str:
    """By the lines of the calibration text."""
    rows = {
        f"{query}, {title}": (f"perplexity{name}", settings | DEFAULT)
        for query, settings in (("own query", OWN), ("corrected query", AHEAD))
        for title, name in (("a paragraph a line", ""), ("broken lines", "-broken-lines"))
    }
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


TASKS = ("copa", "openbookqa", "winogrande", "piqa", "rte")


def tasks_table(folder: Path) -> str:
    """Right answers of multiple choice, and how many choices are the full cache's."""
    titles = {"full": "full cache", "infinigen": "infinigen", "h2o": "h2o", "window": "window"}
    rows = []
    for model, lines in measured_models(folder, "tasks").items():
        for policy, title in titles.items():
            line = next(x for x in lines if x["policy"] == policy)
            tasks = {task["task"]: task["accuracy"] for task in line["tasks"]}
            same = "" if line["same"] is None else f"{100 * line['same']:.1f}"
            rows.append([f"{model}, {title}", *(f"{100 * tasks[n]:.0f}" for n in TASKS), same])
    return markdown(["", *TASKS, "as the full cache"], rows)


POOLS = [f"{share} {order}" for share in ("80%", "50%") for order in ("counter", "lru", "fifo")]


def pool_table(folder: Path) -> str:
    """Perplexity above that of InfiniGen without a limit, and above the full cache's."""
    measured = measured_models(folder, "perplexity-pool")
    head, rows = ["pool"], []
    for model in measured:
        head += [model, "above the full cache"]
    for pool in ("all", *POOLS):
        cells = [pool.replace("%", " %") if pool != "all" else "none"]
        for lines in measured.values():
            change = "–" if pool == "all" else pool_cell(lines, pool)
            cells += [change, above(find(lines, "infinigen", {"pool": pool}))]
        rows.append(cells)
    for share in ("80%", "50%"):
        cells = [f"*full cache, {share.replace('%', ' %')}*"]
        for lines in measured.values():
            cells += ["", above(find(lines, "full", {"pool": f"{share} fifo"}))]
        rows.append(cells)
    return markdown(head, rows)


def paper_pool_table(folder: Path) -> str:
    """The paper's own case: its settings, and no row kept for being among the first."""
    rows = {"no limit": "all"}
    rows |= {f"80 % {order}": f"80% {order} sinks 0" for order in ("counter", "lru", "fifo")}
    measured = measured_models(folder, "perplexity-pool-paper")
    made = []
    for title, pool in rows.items():
        found = (find(x, "infinigen-paper", {"pool": pool}) for x in measured.values())
        made.append([title, *map(above, found)])
    return markdown(["pool", *measured], made)


def pool_end_table(folder: Path) -> str:
    """Above InfiniGen without a limit in the last chunk of the windows alone."""
    measured = measured_models(folder, "perplexity-pool")
    rows = []
    for pool in POOLS:
        changes = [end_change(lines, pool) for lines in measured.values()]
        cells = [pool.replace("%", " %"), *("" if x is None else f"{x:+.2f}" for x in changes)]
        rows.append(cells)
    return markdown(["pool", *measured], rows)


def _of_quantisation(folder: Path, table: Callable[[dict[str, Any]], str]) -> str:
    return table(json.loads((folder / "quantisation.json").read_text()))


TABLES: Mapping[str, Callable[[Path], str]] = {
    "perplexity": perplexity_table,
    "divergence": divergence_table,
    "books": books_table,
    "books divergence": lambda folder: books_table(folder, apart),
    "none dense": lambda folder: books_table(folder, above, "perplexity-none-dense"),
    "none dense divergence": lambda folder: books_table(folder, apart, "perplexity-none-dense"),
    "tail": tail_table,
    "tail divergence": lambda folder: tail_table(folder, apart),
    "alphas ahead": alphas_ahead_table,
    "columns": columns_table,
    "layer budgets": layer_budgets_table,
    "layer budgets divergence": lambda folder: layer_budgets_table(folder, apart),
    "parts": parts_table,
    "steps": steps_table,
    "steps divergence": lambda folder: steps_table(folder, apart),
    "rows": rows_table,
    "tasks": tasks_table,
    "pool": pool_table,
    "pool end": pool_end_table,
    "paper's pool": paper_pool_table,
    "leads": leads_table,
    "leads divergence": lambda folder: leads_table(folder, apart),
    "dense": dense_table,
    "dense divergence": lambda folder: dense_table(folder, apart),
    "broken": broken_table,
    "broken divergence": lambda folder: broken_table(folder, apart),
    "seen": seen_table,
    "seen divergence": lambda folder: seen_table(folder, apart),
    "seen recall": seen_recall_table,
    "recall common": common_recall_table,
    "calibration": calibration_table,
    "lost tiny-llama": lambda folder: lost_table(folder, "tiny-llama"),
    "lost tiny-opt": lambda folder: lost_table(folder, "tiny-opt"),
    "lost books-llama": lambda folder: lost_table(folder, "books-llama"),
    "recall books-llama": lambda folder: recall_table(folder, "books-llama"),
    "recall tiny-llama": lambda folder: recall_table(folder, "tiny-llama"),
    "recall tiny-opt": lambda folder: recall_table(folder, "tiny-opt"),
    "stored rows": lambda folder: _of_quantisation(folder, rows_of_formats),
    "indexes": lambda folder: _of_quantisation(folder, index_table),
    "scoring": lambda folder: _of_quantisation(folder, speed_table),
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
