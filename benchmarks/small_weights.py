"""Perplexity with small weights (`--weight-dtype`), compared with weights in float32.

    python -m benchmarks.small_weights --text book.txt
    python -m benchmarks.small_weights --model FOLDER --text text.txt --window 1280 --context 1024

The whole cache is on the device and exact, so that lines differ by their weights alone. All lines
score the same tokens, and differences are paired (`infinigen_jax.evaluation.perplexity`).
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.files import RESULTS, note, write_json
from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import Parser, run_command
from infinigen_jax.evaluation.parts import Measurement
from infinigen_jax.evaluation.perplexity import HEAD, LIKELIEST, Scoring, cells, lines_of
from infinigen_jax.evaluation.report import provenance, table
from infinigen_jax.evaluation.texts import Text, add_window_options, cut_windows
from infinigen_jax.loading.load import load
from infinigen_jax.machine.memory_limits import tree_bytes
from infinigen_jax.policies import Full
from infinigen_jax.settings.engine import WEIGHT_DTYPES


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks.small_weights",
        description="Measure what small weights cost in perplexity.",
    )
    add = parser.add_argument
    add("--model", metavar="M", help="model, as for `generate` (default: books-llama)")
    add_window_options(parser)
    add("--batch", type=int, default=8, metavar="B", help="windows per batch (default 8)")
    add("--json", type=Path, default=RESULTS / "small-weights.json", help="result file")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    return run_command(lambda: measure(options))


def measure(options: argparse.Namespace) -> None:
    """Measure all dtypes, print the table and write the result."""
    model = load(options.model, dtype="float32")
    windows, described = cut_windows(options, Text.read(options.text), model)
    settings = described["settings"]
    settings["likeliest"] = min(LIKELIEST, model.config.vocab_size)
    scoring = Scoring(windows, settings)
    result = provenance(model, options.model or model.path or "") | described
    del model
    lines = lines_of(_measured(options, scoring), scoring)
    write_json(options.json, result | {"configurations": lines})
    rows = [[line["weights"], f"{line['weight_bytes']:,}", *cells(line)] for line in lines]
    print(table(["weights", "bytes", *HEAD], rows))


def _measured(options: argparse.Namespace, scoring: Scoring) -> Iterator[Measurement]:
    """Yield a measurement for each dtype; one model is in memory at a time."""
    for weight_dtype in (None, *WEIGHT_DTYPES):
        model = load(options.model, dtype="float32", weight_dtype=weight_dtype)
        engine = Engine(model, policy=Full(), dense_layers=model.config.num_layers)
        described: dict[str, Any] = {
            "weights": weight_dtype or "float32",
            "reference": weight_dtype is None,
            "weight_bytes": tree_bytes(model.params),
        }
        note(f"weights {described['weights']}")
        measured = scoring(engine, lambda tokens: None)
        yield measured._replace(values=described | measured.values)
        del model, engine


if __name__ == "__main__":
    sys.exit(main())
