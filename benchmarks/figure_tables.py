"""The tables of docs/figures.md; see `quality_tables`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures import sensitivity, skewing
from benchmarks.table_cells import Line, above, fetched, find, markdown, pool_cell, read

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
    rows = {f"{ratio:g}": {"partial_ratio": ratio} for ratio in skewing.RATIOS}
    bases = ("none", "svd", "balanced")
    columns = {basis: ("infinigen-paper", {"basis": basis}, above) for basis in bases}
    return figure_table(folder, "skewing", rows, columns, "columns")


def alphas_table(folder: Path) -> str:
    """Figure 17: alpha."""
    rows = {f"{alpha:g}": {"alpha": alpha} for alpha in sensitivity.ALPHAS}
    own, papers = (
        (name, {"partial_ratio": sensitivity.OWN_RATIO[name]})
        for name in ("infinigen", "infinigen-paper")
    )
    columns = {
        "fetched": (*own, fetched),
        "infinigen": (*own, above),
        "paper's settings, a fifth of the columns": (*papers, above),
    }
    return figure_table(folder, "sensitivity", rows, columns, "alpha")


def ratios_table(folder: Path) -> str:
    """Figure 17: columns of the index."""
    ratios = sorted({ratio for swept in sensitivity.RATIOS.values() for ratio in swept})
    rows = {f"{ratio:g}": {"partial_ratio": ratio} for ratio in ratios}
    columns = {
        "infinigen": ("infinigen", {"alpha": sensitivity.ALPHA}, above),
        "paper's settings": ("infinigen-paper", {"alpha": sensitivity.ALPHA}, above),
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
            cells += [pool_cell(lines, f"{share} {order}") for order in orders]
        rows.append(cells)
    head = (f"{model}: {order}" for model in measured for order in orders)
    return markdown(["limit", *head], rows)


FIGURE_TABLES: Mapping[str, Callable[[Path], str]] = {
    "kv-size": kv_size_table,
    "chunks": chunks_table,
    "skewing": skewing_table,
    "alphas": alphas_table,
    "ratios": ratios_table,
    "long context": long_context_table,
    "limits": limits_table,
}
