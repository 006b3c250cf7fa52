"""What each layer loses with few rows, as conversions measured it (`infinigen_jax.convert.loss`).

    python -m benchmarks.losses books-llama converted/books-llama-behind

Of each model, by the name of an embedded one or its folder: the relative error behind each layer's
attention with 5 % of the rows, chosen by the layer's own query and by the one guessed ahead.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.files import RESULTS, note, write_json
from infinigen_jax.checkpoint import Model, load, model_folder
from infinigen_jax.errors import Parser, run_command


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.losses", description="Show what layers lose.")
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help="converted folders or names of embedded models")
    add("--json", type=Path, default=RESULTS / "losses.json", help="result file")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    return run_command(lambda: measure(options))


def measure(options: argparse.Namespace) -> None:
    lines: list[dict[str, Any]] = []
    for name in options.models:
        model = load(model_folder(name))
        lines += losses(Path(name).name, model)
    write_json(options.json, {"benchmark": "losses", "machine": machine.describe(), "lines": lines})
    print(table(lines))
    note(f"written to {options.json}")


def losses(name: str, model: Model) -> list[dict[str, Any]]:
    """One line for each way of choosing rows; none where the conversion did not measure them."""
    if model.sparse_loss is None:
        return []
    ahead = f"guessed from {model.speculate_from}, layers ahead: {model.layers_ahead}"
    return [
        {"model": name, "query": query, "error": [float(x) for x in model.sparse_loss[:, i]]}
        for i, query in enumerate(("own", ahead))
    ]


def table(lines: list[dict[str, Any]]) -> str:
    """In Markdown, a column for each layer."""
    layers = max((len(line["error"]) for line in lines), default=0)
    heads = ["model", "query", *map(str, range(layers))]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for line in lines:
        cells = [line["model"], line["query"], *(f"{x:.4f}" for x in line["error"])]
        rows.append(f"| {' | '.join(cells + [''] * (len(heads) - len(cells)))} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
