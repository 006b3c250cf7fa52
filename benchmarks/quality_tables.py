"""Tables in the documentation, out of the results of `benchmarks.quality`.

A table stands between the comments `<!-- table: NAME -->` and `<!-- end -->`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
MODELS = ("books-llama", "tiny-llama", "tiny-opt", "stories260k")
OWN, AHEAD = {"query": "own"}, {"query": "corrected"}
# What a row of the tables of policies is called, and which line of a result it is.
POLICIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "**infinigen**, own query (CPU)": ("infinigen", OWN),
    "**infinigen**, corrected query, a layer ahead (GPU)": ("infinigen", AHEAD),
    "infinigen-paper": ("infinigen-paper", {}),
    "quest": ("quest", {}),
    "h2o": ("h2o", {}),
    "window": ("window", {}),
    "previous-query": ("previous-query", {}),
    "oracle (study)": ("oracle", {}),
}
TAILS = {
    "**as by default**: blocks of 64, 8 columns": {},
    "16 columns": {"tail_columns": 16},
    "no columns": {"tail_columns": 0},
    "blocks of 16, 8 columns": {"tail_tokens": 16},
    "a value for each token": {"tail_tokens": 1},
    "one mean for all": {"tail_tokens": 0},
    "no tail": {"tail": False},
    "alpha 4": {"alpha": 4.0},
    "no alpha": {"alpha": "inf"},
}
BUDGETS = (0.05, 0.1)
DOCS = Path(__file__).resolve().parent.parent / "docs"
PLACE = re.compile(r"(<!-- table: (.+?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def read(folder: Path, name: str) -> list[Line] | None:
    """The lines of a result, if it is there."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["configurations"] if path.exists() else None


def find(lines: Sequence[Line], policy: str, settings: Mapping[str, Any]) -> Line | None:
    """The line of a policy that has these settings, if there is one.

    Raises:
        ValueError: if there are several.
    """
    found = [
        line
        for line in lines
        if line["policy"] == policy
        and not line["reference"]
        and all(line["settings"].get(key) == value for key, value in settings.items())
    ]
    if len(found) > 1:
        raise ValueError(f"{len(found)} lines of {policy} with {dict(settings)}")
    return found[0] if found else None


def above(line: Line | None) -> str:
    """Perplexity above the full cache's, in %, and its standard error."""
    if line is None:
        return ""
    error = 100 * line["difference_standard_error"]
    return f"{line['perplexity_change_percent']:+.2f} ({error:.2f})"


def fetched(line: Line | None) -> str:
    return "" if line is None else f"*{100 * line['fetched_fraction']:.1f} %*"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, its first column of text, without rows that are empty but for it."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows if any(row[1:]))])


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
    traffic = {"fetched by infinigen, own query": ("infinigen", OWN)}
    return by_model(folder, "perplexity", POLICIES, traffic)


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
    chosen = ("**as by default**: blocks of 64, 8 columns", "alpha 4", "no alpha")
    traffic = {f"fetched, {title.split('**: ')[0].strip('*')}": rows[title] for title in chosen}
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
            shares = ("top_k_recall", "mass", "of_oracle")
            cells += [f"{100 * line[share]:.1f}" if line else "" for share in shares]
            cells.append(f"{line['error']:.3f} ({line['oracle_error']:.3f})" if line else "")
        rows.append(cells)
    return markdown(head, rows)


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
            free = find(lines, "infinigen", {"pool": "all"})
            line = find(lines, "infinigen", {"pool": pool})
            if line is None or free is None:
                cells.append("")
                continue
            change = 100 * (line["perplexity"] / free["perplexity"] - 1)
            beyond = f"({line['perplexity_change_percent']:+.2f})"
            cells.append(f"{change:+.2f} {beyond}" if line is not free else f"– {beyond}")
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
        cells = [pool.replace("%", " %")]
        for lines in measured.values():
            free = find(lines, "infinigen", {"pool": "all"})
            line = find(lines, "infinigen", {"pool": pool})
            if line is None or free is None:
                cells.append("")
                continue
            last = (one["chunks"][-1]["perplexity"] for one in (line, free))
            cells.append(f"{100 * (next(last) / next(last) - 1):+.2f}")
        rows.append(cells)
    return markdown(["pool", *measured], rows)


FIGURE_MODELS = ("books-llama", "tiny-opt")


def figure(folder: Path, name: str) -> dict[str, list[Line]]:
    """The results of a figure, by model."""
    results = {model: read(folder, f"figures/{name}-{model}") for model in FIGURE_MODELS}
    return {model: lines for model, lines in results.items() if lines}


def figure_table(
    folder: Path,
    name: str,
    rows: Mapping[str, Mapping[str, Any]],
    columns: Mapping[str, tuple[str, Mapping[str, Any], Callable[[Line | None], str]]],
    first: str = "",
) -> str:
    """A column of each model for each of `columns`.

    Args:
        rows: settings of a line.
        columns: a policy, settings, and what is told of the line that has both.
        first: head of the first column.
    """
    measured = figure(folder, name)
    head = [f"{model}: {title}" for model in measured for title in columns]
    made = []
    for title, settings in rows.items():
        cells = [
            cell(find(lines, policy, {**own, **settings}))
            for lines in measured.values()
            for policy, own, cell in columns.values()
        ]
        made.append([title, *cells])
    return markdown([first, *head], made)


def kv_size_table(folder: Path) -> str:
    """The paper's figure 11 on the reference models."""
    measured = figure(folder, "kv-size")
    budgets = {"infinigen": (0.02, 0.05, 0.1, 0.2, 0.4), "h2o": (0.02, 0.1, 0.4)}
    budgets["window"] = budgets["h2o"]
    wanted: list[tuple[str, str, dict[str, Any]]] = [
        (f"{policy}, budget {budget}", policy, {"budget": budget})
        for policy, several in budgets.items()
        for budget in several
    ]
    for alpha, budget in ((4.0, 0.2), (7.0, 0.6)):
        title = f"paper's settings, alpha {alpha:.0f}, budget {budget}"
        wanted.append((title, "infinigen-paper", {"alpha": alpha, "budget": budget}))
    wanted += [(f"full cache, rows in {rows}", "full", {"rows": rows}) for rows in ("int8", "int4")]
    rows = []
    for title, policy, settings in wanted:
        cells = [title]
        for lines in measured.values():
            line = find(lines, policy, settings)
            size = "" if line is None else f"{100 * line['relative_kv_size']:.1f} %"
            cells += [size, above(line)]
        rows.append(cells)
    head = [part for name in measured for part in (f"{name}: KV size", "perplexity")]
    return markdown(["", *head], rows)


def chunks_table(folder: Path) -> str:
    """Figure 12: by position."""
    measured = figure(folder, "chunks")
    policies = {"infinigen": "infinigen", "h2o": "h2o", "window": "window"}
    policies["paper's settings"] = "infinigen-paper"
    ends = sorted({c["to"] for lines in measured.values() for c in lines[0]["chunks"]})
    rows = []
    for model, lines in measured.items():
        for title, policy in policies.items():
            if line := find(lines, policy, {}):
                by_end = {c["to"]: c["perplexity_change_percent"] for c in line["chunks"]}
                parts = (f"{by_end[end]:+.2f}" if end in by_end else "" for end in ends)
                rows.append([f"{model}: {title}", *parts, above(line)])
    return markdown(["tokens up to", *(f"{end:,}" for end in ends), "all"], rows)


def skewing_table(folder: Path) -> str:
    """Figure 13: bases, by the share of columns."""
    rows = {f"{ratio:g}": {"partial_ratio": ratio} for ratio in (0.1, 0.2, 0.3, 0.5, 1.0)}
    bases = ("none", "svd", "balanced")
    columns = {basis: ("infinigen-paper", {"basis": basis}, above) for basis in bases}
    return figure_table(folder, "skewing", rows, columns, "columns")


def alphas_table(folder: Path) -> str:
    """Figure 17: alpha."""
    rows = {f"{alpha:g}": {"alpha": alpha} for alpha in (1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 9.0)}
    columns = {
        "fetched": ("infinigen", {"partial_ratio": 1.0}, fetched),
        "infinigen": ("infinigen", {"partial_ratio": 1.0}, above),
        "paper's settings, a fifth of the columns": (
            "infinigen-paper",
            {"partial_ratio": 0.2},
            above,
        ),
    }
    return figure_table(folder, "sensitivity", rows, columns, "alpha")


def ratios_table(folder: Path) -> str:
    """Figure 17: columns of the index."""
    rows = {f"{ratio:g}": {"partial_ratio": ratio} for ratio in (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)}
    columns = {
        "infinigen": ("infinigen", {"alpha": 4.0}, above),
        "paper's settings": ("infinigen-paper", {"alpha": 4.0}, above),
    }
    return figure_table(folder, "sensitivity", rows, columns, "columns")


def long_context_table(folder: Path) -> str:
    """Figure 19: the same rows kept, whatever the length."""
    measured = figure(folder, "long-context")
    policies = ("infinigen", "h2o", "window", "infinigen-paper")
    names = (*policies[:-1], "paper's settings")
    lengths = sorted({line["length"] for lines in measured.values() for line in lines})
    rows = [
        [
            f"{length:,}",
            *(
                above(find([x for x in lines if x["length"] == length], policy, {}))
                for lines in measured.values()
                for policy in policies
            ),
        ]
        for length in lengths
    ]
    return markdown(["length", *(f"{model}: {name}" for model in measured for name in names)], rows)


def limits_table(folder: Path) -> str:
    """Table 2: limits of the host pool, above InfiniGen without one."""
    measured = figure(folder, "pool")
    orders = ("fifo", "lru", "counter")
    rows = []
    for share in ("80%", "60%"):
        cells = [f"{share.replace('%', ' %')} of the context"]
        for lines in measured.values():
            free = find(lines, "infinigen", {"pool": "all"})
            for order in orders:
                line = find(lines, "infinigen", {"pool": f"{share} {order}"})
                if line is None or free is None:
                    cells.append("")
                    continue
                cells.append(f"{100 * (line['perplexity'] / free['perplexity'] - 1):+.2f}")
        rows.append(cells)
    head = (f"{model}: {order}" for model in measured for order in orders)
    return markdown(["limit", *head], rows)


TABLES: Mapping[str, Callable[[Path], str]] = {
    "perplexity": perplexity_table,
    "equal memory": equal_memory_table,
    "tail": tail_table,
    "alphas ahead": alphas_ahead_table,
    "layer budgets": layer_budgets_table,
    "pool": pool_table,
    "pool end": pool_end_table,
    "recall books-llama": lambda folder: recall_table(folder, "books-llama"),
    "recall tiny-llama": lambda folder: recall_table(folder, "tiny-llama"),
    "recall tiny-opt": lambda folder: recall_table(folder, "tiny-opt"),
    "kv-size": kv_size_table,
    "chunks": chunks_table,
    "skewing": skewing_table,
    "alphas": alphas_table,
    "ratios": ratios_table,
    "long context": long_context_table,
    "limits": limits_table,
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
