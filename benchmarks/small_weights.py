"""Perplexity and speed with small weights (`--weight-dtype`), compared with weights in float32.

    python -m benchmarks.small_weights --text book.txt
    python -m benchmarks.small_weights --model FOLDER --text text.txt --window 1280 --context 1024
    python -m benchmarks.small_weights --model FOLDER --text text.txt --context 1024 --speed 1 4 8

For perplexity, the whole cache is on the device and exact, so that lines differ by their weights
alone. All lines score the same tokens, and differences are paired
(`infinigen_jax.evaluation.perplexity`). For speed, engines with default settings decode in turns.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, describe, note, write_json
from benchmarks.measure import turns
from benchmarks.shapes import prompts
from benchmarks.systems import MARGIN, Ours
from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import Parser, run_command
from infinigen_jax.evaluation.perplexity import HEAD, LIKELIEST, Scoring, cells, lines_of
from infinigen_jax.evaluation.report import provenance, table
from infinigen_jax.evaluation.session import Measurement
from infinigen_jax.evaluation.texts import Text, add_window_options, cut_windows
from infinigen_jax.loading.load import Model, load
from infinigen_jax.machine.memory_limits import tree_bytes
from infinigen_jax.policies import Full
from infinigen_jax.settings.engine import WEIGHT_DTYPES

DTYPES = {"float32": None, **{name: name for name in WEIGHT_DTYPES}}
ROUNDS, TOKENS = 5, 32  # of decoding; the tokens of a round are timed together


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m benchmarks.small_weights",
        description="Measure what small weights cost in perplexity.",
    )
    add = parser.add_argument
    add("--model", metavar="M", help="model, as for `generate` (default: books-llama)")
    add_window_options(parser)
    add("--batch", type=int, default=8, metavar="B", help="windows per batch (default 8)")
    add("--speed", type=int, nargs="+", metavar="B", help="decode in these batches instead")
    add("--json", type=Path, help="result file (default: in benchmarks/results)")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.speed and options.context is None:
        parser.error("--speed: give --context, the tokens before those that are timed")
    name = "small-weights-speed.json" if options.speed else "small-weights.json"
    options.json = options.json or RESULTS / name
    return run_command(lambda: time_decoding(options) if options.speed else measure(options))


def measure(options: argparse.Namespace) -> None:
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
    for name, weight_dtype in DTYPES.items():
        model = load(options.model, dtype="float32", weight_dtype=weight_dtype)
        engine = Engine(model, policy=Full(), dense_layers=model.config.num_layers)
        described: dict[str, Any] = {
            "weights": name,
            "reference": weight_dtype is None,
            "weight_bytes": tree_bytes(model.params),
        }
        note(f"weights {name}")
        measured = scoring(engine, lambda tokens: None)
        yield measured._replace(values=described | measured.values)
        del model, engine


def time_decoding(options: argparse.Namespace) -> None:
    """Time the decoding of each batch after `--context` tokens, and write the result."""
    model = load(options.model, dtype="float32")
    batches = [_speeds(options, model, batch) for batch in options.speed]
    name = options.model and Path(options.model).name
    result = {"machine": describe(), "model": name, "context": options.context}
    write_json(options.json, result | {"rounds": ROUNDS, "tokens": TOKENS, "batches": batches})
    rows = [
        [str(x["batch"]), *map("{:.1f}".format, x["tokens_per_second"].values())] for x in batches
    ]
    print(table(["sequences", *DTYPES], rows))


def _speeds(options: argparse.Namespace, model: Model, batch: int) -> dict[str, Any]:
    """Return tokens per second of all sequences, medians; all dtypes take turns in each round."""
    given = prompts(model, options.context, batch, Path(options.text))
    new = (1 + ROUNDS) * (TOKENS + MARGIN) + 1
    systems: dict[str, Ours] = {}
    for name, dtype in DTYPES.items():
        note(f"{batch} sequences: weights {name}")
        small = load(options.model, dtype="float32", weight_dtype=dtype) if dtype else model
        systems[name] = Ours(Engine(small).start(given, max_new_tokens=new))
        systems[name].warm_up(1, TOKENS)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for index in range(ROUNDS):
        for name in turns(list(systems), index):
            seconds[name].append(systems[name].round(TOKENS))
    speeds = {name: batch * TOKENS / statistics.median(x) for name, x in seconds.items()}
    return {"batch": batch, "tokens_per_second": speeds, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
