"""Tables of quality in the documentation, described for `benchmarks.tables`."""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import sensitivity, skewing
from benchmarks.tables import Spec, Titled, result_table

DOCS = Path(__file__).resolve().parent.parent / "docs"
PLACE = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
MODELS = ("books-llama", "tiny-llama", "tiny-opt")
FIGURE_MODELS = ("books-llama", "tiny-opt")
BUDGETS = (0.05, 0.1)


def across(*axes: Titled, joint: str = ", ") -> Titled:
    """Return every combination of entries: titles joined, settings merged."""
    return [
        (
            joint.join(title for title, _ in each if title),
            {name: value for _, spec in each for name, value in spec.items()},
        )
        for each in itertools.product(*axes)
    ]


def values(name: str, numbers: Sequence[Any], pattern: str = "{}") -> Titled:
    """Return an entry for each value of a setting."""
    return [(pattern.format(value), {name: value}) for value in numbers]


def by_model(result: str, titled: Titled, models: Sequence[str] = MODELS) -> Titled:
    """Return columns: `titled` for each model, whose name is in the title of its first column."""
    return [
        (title if i else f"{model} {title}".strip(), {"result": result, "model": model, **spec})
        for model in models
        for i, (title, spec) in enumerate(titled)
    ]


def by_figure(name: str, titled: Titled) -> Titled:
    """Return columns of a figure: `titled` for each model."""
    result = f"figures/{name}-{{model}}"
    models = [(model, {"result": result, "model": model}) for model in FIGURE_MODELS]
    return across(models, titled, joint=": ")


def pools(shares: Sequence[int], orders: Sequence[str]) -> Titled:
    return [(f"{n} % {order}", {"pool": f"{n}% {order}"}) for n in shares for order in orders]


INFINIGEN = {"policy": "infinigen"}
OWN, AHEAD = INFINIGEN | {"query": "own"}, INFINIGEN | {"query": "corrected"}
OWN_4, AHEAD_4 = OWN | {"alpha": 4.0}, AHEAD | {"alpha": 4.0}
OURS: Titled = [
    ("**infinigen**, own query (CPU)", OWN_4),
    ("**infinigen**, corrected query (GPU)", AHEAD_4),
]
OTHERS = values("policy", ("quest", "h2o", "window", "previous-query"))
PAPER: Titled = [("infinigen-paper", {"policy": "infinigen-paper"})]
ORACLE: Titled = [("oracle (study)", {"policy": "oracle"})]
BOTH: Titled = [("5 %", {"budget": 0.05}), ("10 %", {"budget": 0.1})]
DIVERGENCE: Titled = [("", {"show": "divergence"})]
# Steps from the paper's form, a layer ahead with two dense layers, to the default: changes of each.
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "the paper's form": {
        **{"sinks": 0, "window": 1, "count": "mean", "index_dtype": "auto", "partial_ratio": 0.3},
        **{"basis": "svd", "query": "plain", "speculate_from": "input", "tail": False},
        "layer_budgets": "equal",
    },
    "4 sinks and 256 recent tokens resident": {"sinks": 4, "window": 256},
    "a count for each KV head": {"count": "head"},
    "index of three quarters in int4": {"index_dtype": "int4", "partial_ratio": 0.75},
    "balanced basis": {"basis": "balanced"},
    "corrected query": {"query": "corrected", "speculate_from": "resident"},
    "tail, one mean for all": {"tail": True, "tail_tokens": 0},
    "tail in blocks, by the layer's own query": {"tail_tokens": 64, "tail_columns": 0},
    "values predicted within blocks": {"tail_columns": 8},
    "budgets by layer: **the default on a GPU**": {"layer_budgets": "calibrated"},
    "own query: **the default on a CPU**": {"query": "own", "speculate_from": "input"},
}
STEPS: Mapping[str, Mapping[str, Any]] = dict(
    zip(_CHANGES, itertools.accumulate(_CHANGES.values(), lambda a, b: {**a, **b}), strict=True)
)
# Changes of single settings of the default on a CPU.
PARTS: Mapping[str, Mapping[str, Any]] = {
    "**the default on a CPU**": {},
    "no tail": {"tail": False, "tail_tokens": 0, "tail_columns": 0},
    "tail: one mean for all": {"tail_tokens": 0, "tail_columns": 0},
    "tail: blocks of 16": {"tail_tokens": 16},
    "tail: no predicted values": {"tail_columns": 0},
    "tail: values predicted from 16 columns": {"tail_columns": 16},
    "alpha 5": {"alpha": 5.0},
    "no alpha": {"alpha": "inf"},
    "index of all columns": {"partial_ratio": 1.0},
    "index of half of the columns": {"partial_ratio": 0.5},
    "index of a quarter of the columns": {"partial_ratio": 0.25},
    "32 recent tokens": {"window": 32},
    "128 recent tokens": {"window": 128},
    "16 sinks": {"sinks": 16},
    "equal layer budgets": {"layer_budgets": "equal"},
    "one count for all heads": {"count": "mean"},
    "the paper's basis": {"basis": "svd"},
    "plain query, a layer ahead": {"query": "plain"},
    "corrected query, a layer ahead: **the default on a GPU**": {"query": "corrected"},
    "the same, equal layer budgets": {"query": "corrected", "layer_budgets": "equal"},
}
_DEFAULT = OWN_4 | {
    **{"tail": True, "tail_tokens": 64, "tail_columns": 8, "partial_ratio": 0.75, "window": 256},
    **{"sinks": 4, "layer_budgets": "calibrated", "count": "head", "basis": "auto"},
}
ROWS = across(
    [("infinigen", INFINIGEN), ("full cache", {"policy": "full"})],
    values("rows", ("exact", "int8", "int4"), "{} rows"),
)
KV_SIZES: Titled = [
    *across([("infinigen", INFINIGEN)], values("budget", (0.02, 0.05, 0.1, 0.2, 0.4), "budget {}")),
    *across(values("policy", ("h2o", "window")), values("budget", (0.02, 0.1, 0.4), "budget {}")),
    *(
        (f"paper's settings, alpha {a:g}, budget {b}", {**PAPER[0][1], "alpha": a, "budget": b})
        for a, b in ((4.0, 0.2), (7.0, 0.6))
    ),
    *across([("full cache", {"policy": "full"})], values("rows", ("int8", "int4"), "{} rows")),
]
_UNLIMITED: Spec = INFINIGEN | {"show": "between", "against": {"pool": "all"}}
_SWEEP = {
    name: {"policy": name, "partial_ratio": r} for name, r in sensitivity.ALPHA_SWEEP_RATIO.items()
}

# The real model.
TEXTS: Titled = [
    ("WikiText-2", {"text": "wiki"}),
    ("book", {"text": "book"}),
    ("Python", {"text": "python"}),
]
REAL_OURS: Titled = [
    ("**InfiniGen**, own query (default on a CPU)", OWN_4),
    ("**InfiniGen**, a layer ahead (default on a GPU)", AHEAD_4),
]
REAL_OTHERS: Titled = [
    ("oracle: exact scores, no tail", {"policy": "oracle"}),
    ("Quest", {"policy": "quest"}),
    ("previous token's query", {"policy": "previous-query"}),
    ("H2O", {"policy": "h2o"}),
    ("window", {"policy": "window"}),
]
REAL, REAL_OWN = [*REAL_OURS, *REAL_OTHERS], [REAL_OURS[0], *REAL_OTHERS]
REAL_PAPER = "the paper's settings: alpha 5, at most 20 %"
PAPER_SPEC = {"policy": "infinigen-paper", "alpha": 5.0, "budget": 0.2}
# Tokens and budget, and the result that has them.
SIZES: Titled = [
    (f"{tokens}, {budget:.0%}", {"budget": budget, "result": f"real-model/{result}"})
    for tokens, budget, result in (
        ("2,048 tokens", 0.05, "policies-{text}-2048"),
        ("4,096 tokens", 0.02, "budgets-{text}-4096"),
        ("4,096 tokens", 0.05, "windows-{text}-4096"),
        ("4,096 tokens", 0.1, "windows-{text}-4096"),
        ("8,192 tokens", 0.05, "policies-{text}-8192"),
        ("8,192 tokens", 0.1, "policies-{text}-8192"),
    )
]
SHOWN = {
    "above": "perplexity",
    "index": "index, MiB",
    "of oracle": "mass, % of the oracle's",
    "error": "output error",
}


def shown(name: str, *shows: str, **spec: Any) -> Titled:
    """Return columns: values of a result of the real model."""
    given = {"result": f"real-model/{name}", **spec}
    return [(SHOWN.get(show, show), {**given, "show": show}) for show in shows]


def by_text(name: str, *shows: str, **spec: Any) -> Titled:
    """Return columns: values for each text."""
    return across(TEXTS, shown(name, *shows, **spec), joint=": ")


def real_paper(length: int) -> Titled:
    """Return the row of the paper's settings, which have a budget of their own."""
    return [(REAL_PAPER, {**PAPER_SPEC, "result": f"real-model/paper-{{text}}-{length}"})]


BASIC = ("above", "divergence", "fetched")
TABLES: Mapping[str, Any] = {  # rows, columns and corner, arguments of `result_table`
    "perplexity": (
        [
            *(*OURS, *PAPER, *OTHERS, *ORACLE),
            ("*fetched by infinigen, own query*", OWN_4 | {"show": "fetched"}),
        ],
        by_model("perplexity-{model}", BOTH),
    ),
    "books": ([*OURS, *OTHERS], by_model("perplexity-books-{model}", BOTH)),
    "none dense": ([OURS[0], *OTHERS], by_model("perplexity-none-dense-{model}", BOTH, MODELS[:1])),
    "recall": (
        [*OURS, *PAPER, *OTHERS],
        by_model("recall-{model}", across(BOTH, [("", {"show": "of oracle"})])),
    ),
    "retrieval": (
        values("budget", (0.02, 0.05, 0.1), "{:.0%}"),
        across(
            [("infinigen", INFINIGEN), *OTHERS, *ORACLE],
            [("", {"result": "retrieval-books-llama", "show": "accuracy"})],
        ),
        "fetched",
    ),
    "pool": (
        pools((80, 50), ("counter", "lru", "fifo")),
        by_model("perplexity-pool-{model}", [("", _UNLIMITED)]),
        "pool",
    ),
    "rows": (ROWS, by_model("perplexity-rows-{model}", [("", {})])),
    "kv-size": (
        KV_SIZES,
        by_figure("kv-size", [("KV size", {"show": "size"}), ("perplexity", {})]),
    ),
    "skewing": (
        values("partial_ratio", skewing.RATIOS, "{:g}"),
        by_figure("skewing", [(b, {**PAPER[0][1], "basis": b}) for b in skewing.BASES]),
        "columns",
    ),
    "alphas": (
        values("alpha", sensitivity.ALPHAS, "{:g}"),
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
        by_figure(
            "long-context",
            [*values("policy", ("infinigen", "h2o", "window")), ("paper's settings", PAPER[0][1])],
        ),
        "length",
    ),
    "limits": (
        pools((80, 60), ("fifo", "lru", "counter")),
        by_figure("pool", [("infinigen", _UNLIMITED)]),
        "limit",
    ),
    "real policies": (
        [*REAL, *real_paper(4096)],
        [
            *by_text("policies-{text}-4096", "above", "divergence"),
            *shown("policies-wiki-4096", "fetched", text="wiki"),
        ],
    ),
    "real sizes": (SIZES, by_text("", *BASIC, **OWN_4), "budget"),
    "real others": (
        REAL_OWN,
        across(
            TEXTS,
            [("2 %", {"budget": 0.02}), BOTH[1]],
            [("", {"result": "real-model/budgets-{text}-4096", "show": "divergence"})],
        ),
    ),
    "real long": (
        [*REAL, *real_paper(8192)],
        [
            *by_text("policies-{text}-8192", "above", "divergence", budget=0.05),
            *shown("policies-wiki-8192", "fetched", text="wiki", budget=0.05),
        ],
    ),
    "real gemma": (REAL, shown("policies-gemma-8192", *BASIC)),
    "real lookups": (
        [
            ("full cache", {"policy": "full", "reference": True}),
            *(row for row in REAL if row[0] != "previous token's query"),
        ],
        [
            (f"{title}, {length:,}", {"result": f"real-model/{kind}-{length}", "show": "accuracy"})
            for kind, title in {"needles": "in a text", "pairs": "among numbers"}.items()
            for length in (1024, 2048, 4096, 7680)
        ],
    ),
    "real mass": (
        [*REAL, (REAL_PAPER, PAPER_SPEC)],
        shown("recall-wiki-4096", "of oracle", "error", "fetched"),
    ),
    "steps": (
        [(title, INFINIGEN | dict(step)) for title, step in STEPS.items()],
        shown("steps-wiki-4096", *BASIC),
    ),
    "parts": (
        [
            *((title, {**_DEFAULT, **changes}) for title, changes in PARTS.items()),
            ("no dense layers", {"policy": "infinigen", "result": "real-model/dense-wiki-4096"}),
        ],
        shown("parts-wiki-4096", *BASIC, "index"),
    ),
}


def table(name: str, folder: Path) -> str:
    """Return one of TABLES, from the results in `folder`."""
    return result_table(folder, *TABLES[name])


def with_tables(text: str, folder: Path) -> str:
    """Return a page with updated tables between `<!-- table: NAME -->` and `<!-- end -->`."""
    return PLACE.sub(lambda m: f"{m[1]}{table(m[2], folder)}\n{m[4]}", text)


def write_tables(folder: Path) -> None:
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        if (updated := with_tables(text, folder)) != text:
            path.write_text(updated)
