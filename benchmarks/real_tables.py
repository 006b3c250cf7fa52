"""Tables of the real model's quality in the documentation, described for `benchmarks.tables`."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Titled

TEXTS = {"wiki": "WikiText-2", "book": "book", "python": "Python"}
FULL = {"policy": "full", "reference": True}
OWN = {"policy": "infinigen", "query": "own", "alpha": 4.0}
AHEAD = OWN | {"query": "corrected"}
OURS: Titled = [
    ("**InfiniGen**, own query (default on a CPU)", OWN),
    ("**InfiniGen**, a layer ahead (default on a GPU)", AHEAD),
]
OTHERS: Titled = [
    ("oracle: exact scores, no tail", {"policy": "oracle"}),
    ("Quest", {"policy": "quest"}),
    ("previous token's query", {"policy": "previous-query"}),
    ("the paper's settings", {"policy": "infinigen-paper"}),
    ("H2O", {"policy": "h2o"}),
    ("window", {"policy": "window"}),
]
BASELINES = ("previous-query", "infinigen-paper")  # in results of their own
# Tokens and budget, and the result that has them.
SIZES: Titled = [
    (f"{tokens:,} tokens, {budget:.0%}", {"budget": budget, "result": f"real-model/{result}"})
    for tokens, budget, result in (
        (2048, 0.05, "policies-{text}-2048"),
        (4096, 0.02, "budgets-{text}-4096"),
        (4096, 0.05, "policies-{text}-4096"),
        (4096, 0.1, "budgets-{text}-4096"),
        (8192, 0.05, "length-{text}-8192"),
        (8192, 0.1, "length-{text}-8192"),
    )
]
LOOKUPS = {"needles": "in a text", "pairs": "among numbers"}
MASS = {"mass, % of the oracle's": "of oracle", "output error": "error", "fetched": "fetched"}
RULES: Titled = [
    ("alpha 4 (default)", {"alpha": 4.0}),
    ("alpha 5", {"alpha": 5.0}),
    ("alpha 6", {"alpha": 6.0, "partial_ratio": 0.75, "tail_tokens": 64}),
    ("no alpha", {"alpha": "inf"}),
    ("alpha 6, index of all columns", {"partial_ratio": 1.0}),
    ("alpha 6, tail blocks of 32 tokens", {"tail_tokens": 32}),
]

# Query, index columns that predict the tail's values, and the result that has them.
COLUMNS: Titled = [
    (
        f"{title}, {columns or 'none'}" + (" (default)" if columns == 8 else ""),
        {**query, "tail_columns": columns, "tail_tokens": 64, "result": f"real-model/{result}"},
    )
    for title, query, columns, result in (
        ("own query", OWN, 0, "no-columns-wiki-4096"),
        ("own query", OWN, 4, "columns-wiki-4096"),
        ("own query", OWN, 8, "columns-wiki-4096"),
        ("own query", OWN, 16, "columns-wiki-4096"),
        ("a layer ahead", AHEAD, 0, "no-columns-wiki-4096"),
        ("a layer ahead", AHEAD, 8, "no-columns-wiki-4096"),
    )
]


def against_others(ours: str, others: str, baselines: str = "") -> Titled:
    """Return rows of several results: InfiniGen's, the other policies', and those of BASELINES."""
    rows = [(OURS[0][0], OWN | {"result": f"real-model/{ours}"})]
    for title, spec in OTHERS:
        result = baselines if baselines and spec["policy"] in BASELINES else others
        rows.append((title, {**spec, "result": f"real-model/{result}"}))
    return rows


def by_text(result: str, *shows: str, **spec: Any) -> Titled:
    """Return columns: some values for each text."""
    titles = {"above": "perplexity", "divergence": "divergence", "fetched": "fetched"}
    return [
        (f"{title}: {titles[show]}", {"result": result, "text": text, "show": show, **spec})
        for text, title in TEXTS.items()
        for show in shows
    ]


def of_one(name: str, *extra: tuple[str, str], **spec: Any) -> Titled:
    """Return columns: some values of one result."""
    shown = [("perplexity", "above"), ("divergence", "divergence"), ("fetched", "fetched"), *extra]
    return [
        (title, {"result": f"real-model/{name}", "show": show, **spec}) for title, show in shown
    ]


TABLES: Mapping[str, tuple[Titled, Titled, str]] = {
    "real policies": (
        [*OURS, *OTHERS],
        [
            *by_text("real-model/policies-{text}-4096", "above", "divergence"),
            ("fetched", {"result": "real-model/policies-wiki-4096", "show": "fetched"}),
        ],
        "",
    ),
    "real sizes": (SIZES, by_text("", "above", "divergence", "fetched", **OWN), "budget"),
    "real others": (
        against_others("budgets-{text}-4096", "others-{text}-4096", "baselines-{text}-4096"),
        [
            (f"{title}, {100 * size:.0f} %", {"budget": size, "text": text, "show": "divergence"})
            for text, title in TEXTS.items()
            for size in (0.02, 0.1)
        ],
        "",
    ),
    "real long": (
        against_others("length-{text}-8192", "others-{text}-8192", "baselines-{text}-8192"),
        by_text("", "above", "divergence", budget=0.05),
        "",
    ),
    "real gemma": ([*OURS, *OTHERS], of_one("policies-gemma-8192"), ""),
    "real lookups": (
        [
            ("full cache", FULL),
            *OURS,
            *(other for other in OTHERS if other[0] != "previous token's query"),
        ],
        [
            (f"{title}, {length:,}", {"result": f"real-model/{kind}-{length}", "show": "accuracy"})
            for kind, title in LOOKUPS.items()
            for length in (1024, 2048, 4096, 7680)
        ],
        "",
    ),
    "real mass": (
        [*OURS, *OTHERS],
        [
            (title, {"result": "real-model/recall-wiki-4096", "show": show})
            for title, show in MASS.items()
        ],
        "",
    ),
    "real budgets": (
        [
            (f"{title}, {kind}", {**spec, "layer_budgets": kind})
            for title, spec in (("own query", OWN), ("a layer ahead", AHEAD))
            for kind in ("calibrated", "equal")
        ],
        of_one("settings-wiki-4096"),
        "layer budgets",
    ),
    "real rules": (
        RULES,
        of_one("rules-wiki-4096", ("index, MiB", "index"), policy="infinigen"),
        "",
    ),
    "real columns": (COLUMNS, of_one(""), "columns"),
}
