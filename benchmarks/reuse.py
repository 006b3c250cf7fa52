"""What a hot set is worth: rows that are on the device when they are wanted, by size.

    python -m benchmarks.reuse --model DIR... --text FILE

Windows of a text go through the engine: the first half is the prompt, the rest is decoded token by
token as it stands in the text (teacher forcing), so that every setting sees the same tokens. The
hot set changes what moves and nothing else: the scores of the text must not change with it.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from benchmarks.files import RESULTS, note, write_json
from infinigen_jax.errors import InputError

GOAL_SIZE, GOAL = 2.0, 0.6  # a hit rate of 0.6 with twice the budget
COLUMNS = {
    "budget": "budget",
    "size": "hot set, of the budget",
    "selected_fraction": "selected",
    "fetched_fraction": "fetched",
    "hit_rate": "hit rate",
    "bytes_per_token": "bytes a token",
    "nats_per_token": "nats a token",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reuse", description="Measure the hit rate of the hot set."
    )
    add = parser.add_argument
    add("--model", nargs="+", required=True, metavar="DIR", help="converted or Hugging Face folder")
    add("--text", required=True, metavar="FILE")
    add("--window", type=int, default=1024, help="tokens, at most the model's (default 1024)")
    add("--windows", type=int, default=2, help="of the text, evenly spread (default 2)")
    add("--budgets", type=float, nargs="+", default=[0.05, 0.1], metavar="F")
    add("--sizes", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="in multiples of a request")
    add("--alpha", type=float, help="default: the policy's own; inf: the budget alone")
    add("--dense-layers", type=int, help="kept on the device (default: the policy's own)")
    add("--dtype", default="float32")
    add("--json", type=Path, help="result file (default: benchmarks/results/reuse-cpu.json)")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    path = options.json or RESULTS / f"reuse-{machine.device_name()}.json"
    result: dict[str, Any] = {
        "benchmark": "reuse",
        "machine": machine.describe(),
        "text": Path(options.text).name,
        "settings": {
            name: getattr(options, name) for name in ("window", "windows", "alpha", "dense_layers")
        },
        "goal": {"size": GOAL_SIZE, "hit_rate": GOAL},
        "models": [],
    }
    try:
        for folder in options.model:
            result["models"].append(measure_model(options, folder))
            write_json(path, result)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    print(table(result))
    note(f"written to {path}")
    return 0


def measure_model(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Every budget and size with one model."""
    import infinigen_jax as ig
    from infinigen_jax.checkpoint import model_folder
    from infinigen_jax.evaluation.scoring import score_windows
    from infinigen_jax.evaluation.texts import read_text, tokenize

    model = ig.load(model_folder(folder), options.dtype)
    text = tokenize(read_text(options.text), model.tokenizer, model.config.vocab_size)
    size = min(options.window, model.config.max_positions)
    windows = text.cut(size, options.windows)
    entries: list[dict[str, Any]] = []
    for budget in options.budgets:
        given = {} if options.alpha is None else {"alpha": options.alpha}
        policy = ig.InfiniGen(budget=budget, **given)
        plain: np.ndarray | None = None
        for multiple in [0.0, *options.sizes]:  # what all others are compared with comes first
            note(f"{folder}: budget {budget}, hot set {multiple:g} x")
            engine = ig.Engine(
                model,
                policy=policy,
                dense_layers=options.dense_layers,
                hot_set=multiple,
            )
            scores, moved = score_windows(engine, windows, size // 2, len(windows))
            nats = scores.nats
            plain = nats if plain is None else plain
            if not np.allclose(nats, plain, atol=1e-3):
                raise AssertionError("a hot set changed the scores")
            entries.append(
                {
                    "budget": budget,
                    "size": multiple,
                    "selected_fraction": moved.selected / moved.tokens,
                    "fetched_fraction": moved.fetched / moved.tokens,
                    "hit_rate": 1 - moved.fetched_rows / max(1, moved.selected_rows),
                    "bytes_per_token": moved.moved_bytes / moved.tokens,
                    "nats_per_token": float(nats.mean()),
                    "largest_difference_in_nats": float(np.abs(nats - plain).max()),
                }
            )
    return {
        "model": Path(folder).resolve().name,
        "layers": model.config.num_layers,
        "window": size,
        "windows": len(windows),
        "entries": entries,
    }


def table(result: dict[str, Any]) -> str:
    """In Markdown, a table for each model."""
    lines: list[str] = []
    for model in result["models"]:
        lines += [
            f"### {model['model']}, {model['windows']} windows of {model['window']} tokens",
            "",
            f"| {' | '.join(COLUMNS.values())} | goal |",
            "|" + "---|" * (len(COLUMNS) + 1),
        ]
        for entry in model["entries"]:
            met = ""
            if entry["size"] == result["goal"]["size"]:
                met = "met" if entry["hit_rate"] >= result["goal"]["hit_rate"] else "missed"
            cells = [_cell(name, entry) for name in COLUMNS]
            lines.append(f"| {' | '.join(cells)} | {met} |")
        lines.append("")
    return "\n".join(lines)


def _cell(name: str, entry: dict[str, Any]) -> str:
    value = entry[name]
    if name in ("selected_fraction", "fetched_fraction"):
        return f"{value:.2%}"
    if name == "hit_rate":
        return f"{value:.2f}"
    return f"{value:.0f}" if name == "bytes_per_token" else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
