"""Tables of quality in the documentation, described for `benchmarks.tables`."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import real_tables
from benchmarks.figures import sensitivity, skewing
from benchmarks.tables import Spec, Titled, result_table

DOCS = Path(__file__).resolve().parent.parent / "docs"
PLACE = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
MODELS = ("books-llama", "tiny-llama", "tiny-opt")
FIGURE_MODELS = ("books-llama", "tiny-opt")
BUDGETS = (0.05, 0.1)
INFINIGEN = {"policy": "infinigen"}
OWN, AHEAD = INFINIGEN | {"query": "own"}, INFINIGEN | {"query": "corrected"}
OURS: Titled = [
    ("**infinigen**, own query (CPU)", OWN | {"alpha": 4.0}),
    ("**infinigen**, corrected query (GPU)", AHEAD | {"alpha": 4.0}),
]
OTHERS: Titled = [(name, {"policy": name}) for name in ("quest", "h2o", "window", "previous-query")]
PAPER: Titled = [("infinigen-paper", {"policy": "infinigen-paper"})]
ORACLE: Titled = [("oracle (study)", {"policy": "oracle"})]
# Steps from the paper's form, a layer ahead with two dense layers, to the default: changes of each.
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "the paper's": {
        **{"sinks": 0, "window": 1, "count": "mean", "index_dtype": "auto", "partial_ratio": 0.3},
        **{"basis": "svd", "query": "plain", "speculate_from": "input", "tail": False},
        "layer_budgets": "equal",
    },
    "4 sinks and 32 recent tokens resident": {"sinks": 4, "window": 32},
    "a count for each KV head": {"count": "head"},
    "index of three quarters in int4": {"index_dtype": "int4", "partial_ratio": 0.75},
    "balanced basis": {"basis": "balanced"},
    "corrected query": {"query": "corrected", "speculate_from": "resident"},
    "tail, one mean for all": {"tail": True, "tail_tokens": 0},
    "tail in blocks, by the layer's own query": {"tail_tokens": 64, "tail_columns": 0},
    "values predicted within blocks": {"tail_columns": 8},
    "**budgets by layer: the default**": {"layer_budgets": "calibrated"},
}
STEPS: Mapping[str, Mapping[str, Any]] = dict(
    zip(_CHANGES, itertools.accumulate(_CHANGES.values(), lambda a, b: {**a, **b}), strict=True)
)
DEFAULT = OWN | {"count": "head", "basis": "auto", "index_dtype": "int4"}
PARTS: Titled = [
    ("**as by default** on a CPU", DEFAULT),
    ("one count for all heads", DEFAULT | {"count": "mean"}),
    ("the paper's basis", DEFAULT | {"basis": "svd"}),
    ("plain query, a layer ahead", DEFAULT | {"query": "plain"}),
    ("corrected query, a layer ahead", DEFAULT | {"query": "corrected"}),
]
_TAIL = INFINIGEN | {"tail": True, "tail_tokens": 64, "tail_columns": 8, "alpha": 4.0}
TAILS: Titled = [
    ("**as by default**: alpha 4, blocks of 64, 8 columns", _TAIL),
    ("16 columns", _TAIL | {"tail_columns": 16}),
    ("no columns", _TAIL | {"tail_columns": 0}),
    ("blocks of 16", _TAIL | {"tail_tokens": 16}),
    ("a value for each token", INFINIGEN | {"tail_tokens": 1}),
    ("one mean for all", INFINIGEN | {"tail": True, "tail_tokens": 0}),
    ("no tail", INFINIGEN | {"tail": False}),
    ("alpha 5", _TAIL | {"alpha": 5.0}),
    ("no alpha", _TAIL | {"alpha": "inf"}),
]
COLUMNS = {"all columns": 1.0, "three quarters, the default": 0.75, "half": 0.5, "a quarter": 0.25}
# Inputs of a corrected query, and the names of their results.
SEEN: Titled = [
    ("input", AHEAD | {"alpha": 4.0, "result": "perplexity-input-{model}"}),
    ("**after resident rows**", AHEAD | {"alpha": 4.0, "result": "perplexity-{model}"}),
]
DENSE: Titled = [
    (title, INFINIGEN | {"result": f"perplexity-dense-{layers}-{{model}}"})
    for layers, title in enumerate(("none", "one layer", "two layers"))
]
LAYER_BUDGETS: Titled = [
    (f"{title}, {kind}", query | {"layer_budgets": kind})
    for title, query in (("own query", OWN), ("corrected query", AHEAD))
    for kind in ("equal", "calibrated")
]
ROWS: Titled = [
    (f"{title}, {kind} rows", {"policy": policy, "rows": kind})
    for policy, title in (("infinigen", "infinigen"), ("full", "full cache"))
    for kind in ("exact", "int8", "int4")
]
POOLS = [f"{share} {order}" for share in ("80%", "50%") for order in ("counter", "lru", "fifo")]
KV_SIZES: Titled = [
    *((f"infinigen, budget {b}", INFINIGEN | {"budget": b}) for b in (0.02, 0.05, 0.1, 0.2, 0.4)),
    *(
        (f"{name}, budget {b}", {"policy": name, "budget": b})
        for name in ("h2o", "window")
        for b in (0.02, 0.1, 0.4)
    ),
    *(
        (f"paper's settings, alpha {a:g}, budget {b}", {**PAPER[0][1], "alpha": a, "budget": b})
        for a, b in ((4.0, 0.2), (7.0, 0.6))
    ),
    *((f"full cache, {r} rows", {"policy": "full", "rows": r}) for r in ("int8", "int4")),
]
FIGURE_POLICIES: Titled = [
    *((name, {"policy": name}) for name in ("infinigen", "h2o", "window")),
    ("paper's settings", PAPER[0][1]),
]
LIMITS, ORDERS = ("80%", "60%"), ("fifo", "lru", "counter")
_UNLIMITED: Spec = {"show": "between", "against": {"pool": "all"}}


def by_budget(result: str, models: tuple[str, ...] = MODELS, show: str = "above") -> Titled:
    """Return columns: both budgets of each model."""
    return [
        (
            f"{model} 5 %" if budget == BUDGETS[0] else "10 %",
            {"result": result, "model": model, "budget": budget, "show": show},
        )
        for model in models
        for budget in BUDGETS
    ]


def at_five_percent(result: str, *shows: str) -> Titled:
    """Return columns: several values of each model at the smaller budget."""
    return [
        (
            model if show == "above" else show,
            {"result": result, "model": model, "budget": BUDGETS[0], "show": show},
        )
        for model in MODELS
        for show in ("above", *shows)
    ]


def by_figure(name: str, titled: Titled) -> Titled:
    """Return columns of a figure: each of `titled` for each model."""
    return [
        (f"{model}: {title}", {"result": f"figures/{name}-{{model}}", "model": model, **spec})
        for model in FIGURE_MODELS
        for title, spec in titled
    ]


def values(name: str, numbers: Any, pattern: str = "{:g}") -> Titled:
    """Return rows: one for each value of a setting."""
    return [(pattern.format(value), {name: value}) for value in numbers]


_SWEEP = {
    name: {"policy": name, "partial_ratio": r} for name, r in sensitivity.ALPHA_SWEEP_RATIO.items()
}
TABLES: Mapping[str, tuple[Titled, Titled, str]] = {
    "perplexity": (
        [
            *OURS,
            *(*PAPER, *OTHERS, *ORACLE),
            ("*fetched by infinigen, own query*", {**OURS[0][1], "show": "fetched"}),
        ],
        by_budget("perplexity-{model}"),
        "",
    ),
    "books": ([*OURS, *OTHERS], by_budget("perplexity-books-{model}"), ""),
    "books divergence": (
        [*OURS, *OTHERS],
        by_budget("perplexity-books-{model}", show="divergence"),
        "",
    ),
    "none dense": ([OURS[0], *OTHERS], by_budget("perplexity-none-dense-{model}", MODELS[:1]), ""),
    "recall": ([*OURS, *PAPER, *OTHERS], by_budget("recall-{model}", show="of oracle"), ""),
    "retrieval": (
        values("budget", (0.02, 0.05, 0.1), "{:.0%}"),
        [
            (title, {**spec, "result": "retrieval-books-llama", "show": "accuracy"})
            for title, spec in [("infinigen", INFINIGEN), *OTHERS, *ORACLE]
        ],
        "fetched",
    ),
    "pool": (
        [(pool.replace("%", " %"), {"pool": pool}) for pool in POOLS],
        [
            (m, {"result": "perplexity-pool-{model}", "model": m, **INFINIGEN, **_UNLIMITED})
            for m in MODELS
        ],
        "pool",
    ),
    "steps": (
        [(title, INFINIGEN | dict(step)) for title, step in STEPS.items()],
        at_five_percent("perplexity-steps-{model}", "divergence"),
        "",
    ),
    "parts": (PARTS, at_five_percent("perplexity-parts-{model}", "divergence", "fetched"), ""),
    "tail": (TAILS, at_five_percent("perplexity-tail-{model}", "divergence", "fetched"), ""),
    "columns": (
        [(title, INFINIGEN | {"partial_ratio": ratio}) for title, ratio in COLUMNS.items()],
        by_budget("perplexity-columns-{model}"),
        "",
    ),
    "seen": (SEEN, at_five_percent("", "divergence"), ""),
    "dense": (DENSE, at_five_percent("", "divergence"), ""),
    "layer budgets": (
        LAYER_BUDGETS,
        at_five_percent("perplexity-layer-budgets-{model}", "divergence", "fetched"),
        "",
    ),
    "rows": (ROWS, [(m, {"result": "perplexity-rows-{model}", "model": m}) for m in MODELS], ""),
    "kv-size": (
        KV_SIZES,
        by_figure("kv-size", [("KV size", {"show": "size"}), ("perplexity", {})]),
        "",
    ),
    "skewing": (
        values("partial_ratio", skewing.RATIOS),
        by_figure("skewing", [(b, {**PAPER[0][1], "basis": b}) for b in skewing.BASES]),
        "columns",
    ),
    "alphas": (
        values("alpha", sensitivity.ALPHAS),
        by_figure(
            "sensitivity",
            [
                ("fetched", _SWEEP["infinigen"] | {"show": "fetched"}),
                ("infinigen", _SWEEP["infinigen"]),
                ("paper's settings, a fifth of the columns", _SWEEP["infinigen-paper"]),
            ],
        ),
        "alpha",
    ),
    "long context": (
        values("length", (256, 512, 1024), "{:,}"),
        by_figure("long-context", FIGURE_POLICIES),
        "length",
    ),
    "limits": (
        [(f"{s.replace('%', ' %')} {o}", {"pool": f"{s} {o}"}) for s in LIMITS for o in ORDERS],
        by_figure("pool", [("infinigen", INFINIGEN | _UNLIMITED)]),
        "limit",
    ),
    **real_tables.TABLES,
}


def table(name: str, folder: Path) -> str:
    """Return one of TABLES, from the results in `folder`."""
    rows, columns, corner = TABLES[name]
    return result_table(folder, rows, columns, corner)


def with_tables(text: str, folder: Path) -> str:
    """Return a page with updated tables between `<!-- table: NAME -->` and `<!-- end -->`."""
    return PLACE.sub(lambda m: f"{m[1]}{table(m[2], folder)}\n{m[4]}", text)


def write_tables(folder: Path) -> None:
    """Update the documentation's tables."""
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        if (updated := with_tables(text, folder)) != text:
            path.write_text(updated)
