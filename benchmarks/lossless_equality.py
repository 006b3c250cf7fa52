"""Equality of the lossless mode's greedy tokens with those of the full cache.

    python -m benchmarks.lossless_equality --text wikitext2_valid.raw.txt

Every model continues the same number of prompts of different lengths, one at a time and in ragged
batches. Where tokens differ, the result holds the distance of the full cache's two best logits at
the first one. Distances up to ROUNDING count as rounding.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine, shapes
from benchmarks.lossless import always_draft
from benchmarks.machine import RESULTS, note, write_json
from benchmarks.tables import entry_table
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.lossless import LosslessStats
from infinigen_jax.errors import InputError, Parser, run_command
from infinigen_jax.evaluation.texts import common_length
from infinigen_jax.loading.load import Model, load
from infinigen_jax.policies import Full, InfiniGen

MODELS = ("books-llama", "tiny-llama", "tiny-opt")
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1}  # of logits, which are float32
SPREAD = 64  # the prompts of a batch have lengths from the shortest to 64 tokens more
COLUMNS = {
    "model": ("model", "{}"),
    "batch": ("batch", "{}"),
    "equal prompts": ("equal_prompts", "{}"),
    "equal tokens": ("equal_tokens", "{}"),
    "tokens": ("tokens", "{}"),
    "largest distance": ("largest_distance", "{:.1e}"),
    "accepted": ("acceptance_rate", "{:.1%}"),
    "tokens a verification": ("tokens_per_verification", "{:.1f}"),
}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Compare all models and write the result; raise InputError for more than rounding errors."""
    always_draft(options.draft_tokens)
    names = "dtype", "prompts", "tokens", "context", "batches", "budget", "window", "draft_tokens"
    result: dict[str, Any] = {
        "benchmark": "lossless-equality",
        "machine": machine.describe(),
        "settings": {name: getattr(options, name) for name in names},
        "entries": [],
    }
    for name in options.models:
        model = load(name, dtype=options.dtype)
        prompts = _prompts(model, options)
        for batch in options.batches:
            entry = _compare(model, prompts, batch, options)
            result["entries"].append({"model": Path(name).name, "batch": batch} | entry)
            write_json(options.json, result)
            note(str(result["entries"][-1]))
    if any(x["largest_distance"] > ROUNDING[options.dtype] for x in result["entries"]):
        raise InputError(f"tokens differ by more than rounding; see {options.json}")
    return result


def _prompts(model: Model, options: argparse.Namespace) -> list[list[int]]:
    """Return consecutive parts of the text, of random lengths."""
    most = min(options.context, model.config.max_positions) - options.tokens - 1
    lengths = np.random.default_rng(0).integers(max(1, most - SPREAD), most, options.prompts)
    ids = shapes.text_tokens(model.tokenizer, options.text, int(lengths.sum()))
    return [part.tolist() for part in np.split(np.array(ids), np.cumsum(lengths)[:-1])]


def _compare(
    model: Model, prompts: list[list[int]], batch: int, options: argparse.Namespace
) -> dict[str, Any]:
    drafter = InfiniGen(budget=options.budget, window=options.window)
    exact = Engine(model, policy=Full(window=options.window))
    engine = Engine(model, policy=drafter, lossless=True, draft_tokens=options.draft_tokens)
    given: dict[str, Any] = {"ignore_eos": True, "batch": batch, "max_new_tokens": options.tokens}
    full = exact.generate(prompts, log_probs=2, **given)
    lossless = engine.generate(prompts, **given)
    assert isinstance(lossless.stats, LosslessStats)
    same = [common_length(*pair) for pair in zip(full.tokens, lossless.tokens, strict=True)]
    # Of the two best logits where tokens first differ.
    tops = [full.log_probs[i][n].top for i, n in enumerate(same) if n < options.tokens]
    distances = [best - second for (_, best), (_, second) in tops]
    return {
        "equal_prompts": sum(n == options.tokens for n in same),
        "equal_tokens": sum(same),
        "tokens": options.tokens * len(prompts),
        "distances": distances,
        "largest_distance": max(distances, default=0.0),
        "acceptance_rate": lossless.stats.acceptance_rate,
        "tokens_per_verification": lossless.stats.tokens_per_verification,
    }


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.lossless_equality", description="Compare tokens.")
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), metavar="M")
    add("--dtype", choices=ROUNDING, default="float32")
    add("--text", type=Path, required=True, metavar="FILE", help="text of the prompts")
    add("--prompts", type=int, default=50, help="prompts of each model (default 50)")
    add("--tokens", type=int, default=256, help="new tokens of each (default 256)")
    add("--context", type=int, default=2048, help="most tokens of a sequence (default 2048)")
    add("--batches", type=int, nargs="+", default=[1, 10], metavar="N", help="batch sizes")
    add("--budget", type=float, default=0.05, help="maximum share of rows fetched (default 0.05)")
    add("--window", type=int, default=16, help="recent rows on the device (default 16)")
    add("--draft-tokens", type=int, metavar="N", help="tokens per draft (default: by times)")
    add("--json", type=Path, default=RESULTS / "lossless-equality.json", help="result file")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    return run_command(lambda: print(entry_table(COLUMNS, measure(options)["entries"])))


if __name__ == "__main__":
    sys.exit(main())
