"""The measurements of docs/quality.md, quantisation.md and figures.md, and their tables.

    python -m benchmarks.quality --text book.txt
    python -m benchmarks.quality --text book.txt --only perplexity recall --models books-llama
    python -m benchmarks.quality --tables

The first form measures everything for the embedded models and prints each command it runs. It keeps
existing results: remove a file to measure it again. --tables writes the tables of all existing
results into the documentation.
"""

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path

from benchmarks.figures.__main__ import FIGURES
from benchmarks.machine import RESULTS, note
from benchmarks.quality_tables import FIGURE_MODELS, write_tables
from infinigen_jax.checkpoint.hf_folder import read_config
from infinigen_jax.errors import InputError, Parser, run_command
from infinigen_jax.loading.load import EMBEDDED, model_folder

PERPLEXITY = "infinigen_jax.evaluate perplexity --text {text} --chunk {chunk}"
RECALL = "infinigen_jax.evaluate recall --text {text} --chunk {chunk}"
RETRIEVAL = "infinigen_jax.evaluate retrieval --items 10 --batch 50 --length 1024"
BUDGETS = "--budget 0.05 0.1"
# Recent tokens with the memory of InfiniGen's index and tail, in addition to its own 32, in rows
# of bfloat16. The other policies keep per token 8 bytes of a page's bounds, 4 of a sum of attention
# or 64 of a key, more than InfiniGen keeps, while a row has 128.
OTHERS = "window:window=176 quest:window=112 h2o:window=144 previous-query:window=32"
OURS = "infinigen:window=32"
# Layers that the conversion keeps dense for a query speculated one layer earlier.
DENSE_AHEAD = {"books-llama": 2, "tiny-llama": 1, "tiny-opt": 2}
CORRECTED = "infinigen:query=corrected"
POLICIES = f"full infinigen {CORRECTED} infinigen-paper quest h2o window previous-query oracle"
NEEDLES = (
    "--dense-layers 0 --budget 0.02 0.05 0.1 "
    "--policy full infinigen quest h2o window previous-query oracle"
)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Command, run for each model."""

    template: str  # arguments of `python -m`, with names in braces that `command` knows
    models: tuple[str, ...] | None = None  # that it applies to; None: all
    asked_for: bool = False  # run only if named in --only: it reads another text than the rest

    def command(self, folder: Path, text: Path | None, positions: int, result: Path) -> list[str]:
        """Return the command line without Python itself. Positions are reported in eighths."""
        known = {"model": folder, "text": text, "chunk": positions // 8, "result": result}
        known["plot"] = result.with_suffix(".svg")
        template = f"{self.template} --model {{model}} --json {{result}}"
        return [part.format(**known) for part in template.split()]


def _perplexity(arguments: str) -> Experiment:
    return Experiment(f"{PERPLEXITY} --windows 24 --batch 12 {arguments}")


def _many_books(model: str, dense_layers: int, policies: str, windows: int = 240) -> Experiment:
    """Use enough windows of many books to distinguish policies, with equal memory for each."""
    asked = f"--windows {windows} --batch 48 {BUDGETS} --dense-layers {dense_layers}"
    asked += f" --policy full {policies} {OTHERS}"
    return Experiment(f"{PERPLEXITY} {asked}", (model,), asked_for=True)


def _retrieval(arguments: str) -> Experiment:
    return Experiment(f"{RETRIEVAL} {arguments}", ("books-llama",))


EXPERIMENTS = {
    "perplexity": _perplexity(f"{BUDGETS} --policy {POLICIES}"),
    "perplexity-pool": _perplexity(
        "--budget 0.1 --pool-tokens all 80% 50% --pool-eviction counter lru fifo "
        "--policy full infinigen"
    ),
    **{
        f"perplexity-books-{model}": _many_books(
            model, dense_layers, f"{OURS} {CORRECTED},window=32"
        )
        for model, dense_layers in DENSE_AHEAD.items()
    },
    "perplexity-none-dense-books-llama": _many_books("books-llama", 0, OURS, windows=48),
    "perplexity-rows": _perplexity("--budget 0.1 --rows auto int8 int4 --policy full infinigen"),
    "recall": Experiment(f"{RECALL} --windows 16 --batch 16 {BUDGETS} --policy {POLICIES}"),
    "retrieval": _retrieval(NEEDLES),
    "retrieval-haystack": _retrieval(f"--haystack {{text}} {NEEDLES}"),
    "retrieval-dense": _retrieval(f"--budget 0.05 --policy full infinigen {CORRECTED} window h2o"),
    "retrieval-ahead": _retrieval(
        f"--dense-layers 0 --budget 0.02 0.05 0.1 --policy full {CORRECTED}"
    ),
    **{
        f"figures/{name}": Experiment(
            f"benchmarks.figures {name} --text {{text}} --plot {{plot}} --windows 12 --batch 12",
            FIGURE_MODELS,
        )
        for name in FIGURES
    },
}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.quality", description="Measure quality.")
    add = parser.add_argument
    add("--text", type=Path, metavar="F", help="text of all experiments that read one")
    add("--only", nargs="+", metavar="NAME", help=f"experiments: {', '.join(EXPERIMENTS)}")
    models = "embedded models or converted folders (default: the embedded ones)"
    add("--models", nargs="+", default=list(EMBEDDED), metavar="M", help=models)
    add("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the results")
    add("--tables", action="store_true", help="write the documentation's tables, measure nothing")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    if options.tables:
        return run_command(lambda: write_tables(options.out))
    return run_command(lambda: measure(options))


def measure(options: argparse.Namespace) -> None:
    """Run all requested experiments without a result; raise InputError if unknown or failed."""
    names = options.only or [name for name, each in EXPERIMENTS.items() if not each.asked_for]
    for name in names:
        if name not in EXPERIMENTS:
            raise InputError(f"--only {name}: use {' or '.join(EXPERIMENTS)}")
        if "{text}" in EXPERIMENTS[name].template and options.text is None:
            raise InputError("--text: give a text")
    for name in names:
        for model in options.models:
            run(name, model, options.text, options.out)


def run(name: str, model: str, text: Path | None, out: Path) -> None:
    """Run one experiment with one model, unless a result exists or it excludes this model."""
    experiment, model_name = EXPERIMENTS[name], Path(model).name
    if experiment.models is not None and model_name not in experiment.models:
        return
    result = out / f"{name if name.endswith(model_name) else f'{name}-{model_name}'}.json"
    if result.exists():
        note(f"{result}: exists already")
        return
    folder = model_folder(model)
    result.parent.mkdir(parents=True, exist_ok=True)
    call(experiment.command(folder, text, read_config(folder)[1].max_positions, result))


def call(command: list[str]) -> None:
    """Run a module with this Python, output to stderr; raise InputError if it fails."""
    note(" ".join(["python -m", *command]))
    status = subprocess.run([sys.executable, "-m", *command], check=False, stdout=sys.stderr)
    if status.returncode:
        raise InputError(f"python -m {command[0]}: failed with status {status.returncode}")


if __name__ == "__main__":
    sys.exit(main())
