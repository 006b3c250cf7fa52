"""What a model is worth, and what selection can expect of its attention.

    python -m benchmarks.reference_models.report --model DIR --books DIR [--json FILE]
    python -m benchmarks.reference_models.report --model DIR --data DIR [--json FILE]

Validation loss on held-out books, accuracy of long-range lookups with the full cache, outlier
channels, similarity of consecutive layers' inputs, concentration of the attention. A table on
stdout; --json writes all figures. Any Hugging Face folder that this package reads will do.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from infinigen_jax.errors import InputError, Parser, run_command


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.reference_models.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", type=Path, required=True)
    held_out = parser.add_mutually_exclusive_group(required=True)
    held_out.add_argument("--books", type=Path, help="folder of books_val*.tar.xz")
    held_out.add_argument("--data", type=Path, help="the model's own prepared tokens")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--windows", type=int, default=48, help="for the validation loss")
    parser.add_argument("--statistics-windows", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="lookups per kind, length, depth")
    parser.add_argument("--lengths", type=int, nargs="+", help="of lookups; default: 1/4, 1/2, 1")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    return run_command(lambda: run(options))


def run(options: argparse.Namespace) -> int:
    """Measure, write the JSON, print the table."""
    for name in ("windows", "statistics_windows", "samples"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: give at least 1")
    from benchmarks.files import write_json

    result = measure(options)
    if options.json:
        write_json(options.json, result)
    print(table(result))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a report."""
    import jax
    import jax.numpy as jnp

    from benchmarks.files import note
    from benchmarks.machine import describe
    from benchmarks.reference_models.attention import best_attention
    from benchmarks.reference_models.batches import passage, windows
    from benchmarks.reference_models.corpus import held_out, open_corpus
    from benchmarks.reference_models.folder import read_folder
    from benchmarks.reference_models.model import Training, logits, token_losses
    from benchmarks.reference_models.needles import needle_accuracy
    from benchmarks.reference_models.statistics import layer_statistics
    from benchmarks.reference_models.synthetic import SHORTEST, Synthetic
    from benchmarks.reference_models.validation import validate
    from infinigen_jax.prompt_attention import causal_attention
    from infinigen_jax.user_cache import keep_programs

    keep_programs()

    model = read_folder(options.model)
    context = model.config.max_positions
    lengths = options.lengths or sorted({max(context // n, SHORTEST) for n in (4, 2, 1)})
    if not all(SHORTEST <= length <= context for length in lengths):
        raise InputError(f"--lengths: the model takes {SHORTEST} to {context} tokens")
    if options.data:
        corpus = open_corpus(options.data)
        if corpus.tokenizer.to_str() != model.tokenizer.to_str():
            raise InputError(f"--data {options.data}: not of this model's tokenizer; give --books")
        split = corpus.val
    else:
        split = held_out(options.books, model.tokenizer)
    # Without a gradient; the other one is a program of hundreds of products on a GPU.
    on_cpu = jax.default_backend() == "cpu"
    attention = best_attention(jnp.float32) if on_cpu else causal_attention
    training = Training(model.plan, attention, remat=False)

    @jax.jit
    def losses(params, tokens):
        return token_losses(training, params, tokens)

    @jax.jit
    def predict(params, tokens):
        return jnp.argmax(logits(training, params, tokens), axis=-1)

    note("validation loss")
    loss = validate(lambda t: losses(model.params, t), split, context, options.windows, 1)
    note("lookups")
    synthetic = Synthetic(model.tokenizer, lambda rng, n: passage(split, rng, n), 1.0)
    needles = needle_accuracy(
        lambda t: predict(model.params, t), synthetic, lengths, options.samples
    )
    note("attention")
    chosen = windows(split, context, options.statistics_windows)
    return {
        "model": options.model.resolve().name,
        "machine": describe(),
        "context": context,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model.params)),
        "validation": loss,
        "needles": needles,
        "layers": layer_statistics(model.plan, model.params, chosen),
    }


def table(result: dict[str, Any]) -> str:
    """The report to be read, in Markdown."""
    loss, needles = result["validation"], result["needles"]
    lines = [
        f"{result['model']}: {result['parameters']:,} parameters, context {result['context']:,}",
        "",
        f"Validation: {loss['nats_per_token']:.3f} +- {loss['standard_error']:.3f} nats a token, "
        f"{loss['nats_per_character']:.3f} a character; by quarter of the window "
        + ", ".join(f"{part['nats_per_token']:.3f}" for part in loss["by_position"]),
        "",
        "| lookup, full cache | length | "
        + " | ".join(f"depth {d:.0%}" for d in _depths(needles))
        + f" | {needles['facts_of_many']} facts |",
        "|---" * (len(_depths(needles)) + 3) + "|",
    ]
    for many in needles["many"]:
        row = [s for s in needles["single"] if _same(s, many)]
        cells = [_percent(s["accuracy"]) for s in (*row, many)]
        lines.append(f"| {many['kind']} | {many['length']:,} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "| layer | largest channel / median | channels above 6x | energy of top 1 % | "
        "similarity: residual | attention input | mass in top 1 % | 5 % | 10 % |",
        "|---" * 9 + "|",
    ]
    for layer in result["layers"]:
        cells = [
            str(layer["layer"]),
            f"{layer['largest_channel']:.1f}",
            str(layer["outlier_channels"]),
            f"{layer['energy_of_top_1_percent']:.1%}",
            _number(layer["residual_similarity"]),
            _number(layer["input_similarity"]),
            *(f"{mass:.1%}" for mass in layer["mass"].values()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _depths(needles: dict[str, Any]) -> list[float]:
    return sorted({row["depth"] for row in needles["single"]})


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (one["kind"], one["length"]) == (other["kind"], other["length"])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
