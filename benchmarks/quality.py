"""The measurements behind docs/quality.md and docs/figures.md, and their tables there.

    python -m benchmarks.quality --text book.txt --tasks folder
    python -m benchmarks.quality --text book.txt --only perplexity recall --models books-llama
    python -m benchmarks.quality --tables

    python -m benchmarks.quality --text book.txt --renew infinigen

The first measures all, for the embedded models; each command that it runs is shown. A result that
is there is left alone: remove the file to measure it again, or name with --renew the policies whose
lines are to be. --tables writes the tables of what is there into the documentation.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.files import RESULTS, note
from benchmarks.quality_tables import write_tables
from benchmarks.reference_models.books import with_broken_lines
from benchmarks.renewal import only_policies, renewed
from benchmarks.table_cells import STEPS
from infinigen_jax.checkpoint import EMBEDDED, model_folder
from infinigen_jax.convert.calibrate import DEFAULT_TEXT
from infinigen_jax.convert.reader import read_config
from infinigen_jax.errors import InputError, Parser, run_command
from infinigen_jax.output import write_json

BUDGETS = ("--budget", "0.05", "0.1")
WINDOWS = ("--windows", "24", "--batch", "12")
RECALL = ("--windows", "16", "--batch", "16", *BUDGETS)
FIGURES = ("kv-size", "chunks", "skewing", "sensitivity", "long-context", "pool")
# Recent tokens that take the memory of InfiniGen's index and tail beside the usual 32, in rows of
# bfloat16, less what a policy itself keeps of each token: 8 bytes of a page's bounds, 4 of a sum of
# attention, 64 of a key, which is more than InfiniGen keeps, where a row has 128.
OTHERS = ("window:window=176", "quest:window=112", "h2o:window=144", "previous-query:window=32")
# Layers that the conversion keeps dense for a query that looks ahead.
DENSE_AHEAD = {"books-llama": 2, "tiny-llama": 1, "tiny-opt": 2}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A command that is run for each model.

    Attributes:
        program: module, and its sub-command.
        arguments: all but those of model, text and result.
        chunked: whether it reports by position, in eighths of a window.
        models: that it is for; None: all.
        reads: the option that the text is given by, or the tasks' files; None: it reads none.
        conversion: options of a conversion that the model goes through first.
        asked_for: measured only if it is named, as it is of another text than the rest.
    """

    program: tuple[str, str]
    arguments: tuple[str, ...]
    chunked: bool = True
    models: tuple[str, ...] | None = None
    reads: str | None = "--text"
    conversion: tuple[str, ...] = ()
    asked_for: bool = False

    def command(
        self, folder: Path, files: Sequence[Path], positions: int, result: Path
    ) -> list[str]:
        """What is run."""
        module, name = self.program
        given = [module, name, "--model", str(folder)]
        given += [self.reads, *map(str, files)] if self.reads else []
        given += ["--chunk", str(positions // 8)] if self.chunked else []
        plot = ["--plot", str(result.with_suffix(".svg"))] if "figures" in module else []
        return [*given, *self.arguments, "--json", str(result), *plot]


def _perplexity(*arguments: str) -> Experiment:
    return Experiment(("infinigen_jax.evaluate", "perplexity"), (*WINDOWS, *arguments))


def _many_books(model: str, *arguments: str, windows: int = 240) -> Experiment:
    """Enough windows to tell policies apart, of a text of many books."""
    asked = ("--windows", str(windows), "--batch", "48", *BUDGETS, *arguments)
    program = ("infinigen_jax.evaluate", "perplexity")
    return Experiment(program, asked, models=(model,), asked_for=True)


def _settings(values: Mapping[str, Any]) -> str:
    """As behind a policy's name."""
    return ",".join(f"{name}={str(value).lower()}" for name, value in values.items())


def _retrieval(
    text: str | None, *arguments: str, tasks: tuple[str, ...] = ("needle",), length: int = 1024
) -> Experiment:
    asked = ("--task", *tasks, "--items", "10", "--batch", "50", "--length", str(length))
    program = ("infinigen_jax.evaluate", "retrieval")
    return Experiment(program, (*asked, *arguments), False, ("books-llama",), text)


POLICIES = (
    *("full", "infinigen", "infinigen:query=corrected", "infinigen-paper"),
    *("quest", "h2o", "window", "previous-query", "oracle"),
)
NEEDLES = (
    *("--dense-layers", "0", "--budget", "0.02", "0.05", "0.1", "--policy"),
    *("full", "infinigen", "quest", "h2o", "window", "previous-query", "oracle"),
)
TASK_POLICIES = ("--policy", "full", "infinigen", "h2o", "window")
CORRECTED_NEEDLES = (
    *("--budget", "0.02", "0.05", "0.1"),
    *("--policy", "full", "infinigen:query=corrected"),
)
# What a query ahead may see, beside the default.
SEEN = {
    "input": ("--speculate-from", "input"),
    "behind": ("--speculate-from", "attention"),
    "no-neurons": ("--neurons", "0"),
    "input-no-neurons": ("--speculate-from", "input", "--neurons", "0"),
}
# The package's calibration text has a paragraph a line, the book lines of about so many characters.
LINE = 70
BROKEN = "FILE"  # of the calibration text in lines like those
# With all of the budget, as the others have it.
NO_ALPHA = ("infinigen:alpha=inf", "infinigen:query=corrected,alpha=inf")
EXPERIMENTS = {
    "perplexity": _perplexity(*BUDGETS, "--policy", *POLICIES, *NO_ALPHA),
    "perplexity-tail": _perplexity(
        *(*BUDGETS, "--policy", "full"),
        *("infinigen:tail=false", "infinigen:tail_tokens=0"),
        *("infinigen:tail_columns=0", "infinigen", "infinigen:tail_columns=16"),
        *("infinigen:tail_tokens=16", "infinigen:tail_tokens=1"),
        *("infinigen:alpha=5", "infinigen:alpha=inf"),
    ),
    "perplexity-columns": _perplexity(
        *(*BUDGETS, "--policy", "full"),
        *(f"infinigen:partial_ratio={ratio}" for ratio in (1, 0.75, 0.5, 0.25)),
    ),
    "perplexity-alpha-ahead": _perplexity(
        *(*BUDGETS, "--policy", "full"),
        *("infinigen:query=corrected,alpha=4", "infinigen:query=corrected,alpha=5"),
    ),
    "perplexity-layer-budgets": _perplexity(
        *(*BUDGETS, "--policy", "full", "infinigen:layer_budgets=equal"),
        *("infinigen", "infinigen:query=corrected,layer_budgets=equal"),
        "infinigen:query=corrected",
    ),
    "perplexity-pool": _perplexity(
        *("--budget", "0.1", "--pool-tokens", "all", "80%", "50%"),
        *("--pool-eviction", "counter", "lru", "fifo", "--policy", "full", "infinigen"),
    ),
    # The paper's own: its settings, and the first tokens give way as any others.
    "perplexity-pool-paper": _perplexity(
        *("--context", "64", "--pool-tokens", "all", "80%", "--pool-sinks", "0"),
        *("--pool-eviction", "counter", "lru", "fifo"),
        *("--policy", "full", "infinigen-paper:alpha=4,budget=0.2"),
    ),
    **{
        f"perplexity-books-{model}": _many_books(
            *(model, "--dense-layers", str(dense_layers), "--policy", "full", "infinigen"),
            *("infinigen:query=corrected", *OTHERS),
        )
        for model, dense_layers in DENSE_AHEAD.items()
    },
    # Without dense layers; the state behind the attention tells a query ahead of all layers.
    "perplexity-none-dense-books-llama": dataclasses.replace(
        _many_books(
            *("books-llama", "--dense-layers", "0", "--policy", "full", "infinigen"),
            *("infinigen:query=corrected", *OTHERS),
            windows=48,
        ),
        conversion=SEEN["behind"],
    ),
    "perplexity-rows": _perplexity(
        *("--budget", "0.1", "--rows", "auto", "int8", "int4"),
        *("--policy", "full", "infinigen"),
    ),
    "perplexity-parts": _perplexity(
        *("--budget", "0.05", "--policy", "full", "infinigen", "infinigen:index_dtype=int8"),
        *("infinigen:count=fixed", "infinigen:count=pooled", "infinigen:count=top-p"),
        *("infinigen:count=mean", "infinigen:basis=svd", "infinigen:query=plain"),
        "infinigen:query=corrected",
    ),
    "recall": Experiment(
        ("infinigen_jax.evaluate", "recall"),
        (*RECALL, "--policy", *POLICIES),
    ),
    # Of the same layers for all policies, with the same budget in each.
    "recall-common": Experiment(
        ("infinigen_jax.evaluate", "recall"),
        (
            *(*RECALL, "--dense-layers", "2", "--layer-budgets", "equal", "--policy", "full"),
            *("infinigen:query=own", "infinigen:query=corrected"),
        ),
    ),
    "perplexity-steps": _perplexity(
        *(*BUDGETS, "--dense-layers", "2", "--policy", "full"),
        *(f"infinigen:{_settings(step)}" for step in STEPS.values()),
    ),
    **{
        f"perplexity-dense-{layers}": _perplexity(
            *(*BUDGETS, "--dense-layers", str(layers), "--policy", "full", "infinigen")
        )
        for layers in range(3)
    },
    "perplexity-two-ahead": dataclasses.replace(
        _perplexity(
            *(*BUDGETS, "--dense-layers", "2", "--policy", "full"),
            "infinigen:query=corrected,layers_ahead=2",
            *(f"infinigen:query=plain,speculate_from=input,layers_ahead={n}" for n in (1, 2)),
        ),
        conversion=("--layers-ahead", "2"),
    ),
    **{
        f"perplexity-{name}": dataclasses.replace(
            _perplexity(*BUDGETS, "--policy", "full", "infinigen:query=corrected"),
            conversion=conversion,
        )
        for name, conversion in SEEN.items()
    },
    "perplexity-broken-lines": dataclasses.replace(
        _perplexity(*BUDGETS, "--policy", "full", "infinigen", "infinigen:query=corrected"),
        conversion=("--calibration", BROKEN),
    ),
    **{
        f"recall-{name}": Experiment(
            ("infinigen_jax.evaluate", "recall"),
            (*RECALL, "--policy", "full", "infinigen:query=corrected"),
            conversion=conversion,
        )
        for name, conversion in SEEN.items()
    },
    "retrieval": _retrieval(None, *NEEDLES),
    "retrieval-dense": _retrieval(
        *(None, "--budget", "0.05", "--policy", "full", "infinigen", "infinigen:query=corrected"),
        *("window", "h2o"),
    ),
    "retrieval-ahead": _retrieval(None, "--dense-layers", "0", *CORRECTED_NEEDLES),
    "retrieval-ahead-dense": _retrieval(None, "--dense-layers", "2", *CORRECTED_NEEDLES),
    **{
        f"retrieval-{name}": dataclasses.replace(
            _retrieval(None, "--dense-layers", "0", *CORRECTED_NEEDLES), conversion=conversion
        )
        for name, conversion in SEEN.items()
    },
    "retrieval-tasks": _retrieval(
        *(None, "--dense-layers", "0", "--budget", "0.1", "--policy", "full", "infinigen"),
        tasks=("kv", "variables", "aggregation"),
        length=256,
    ),
    "retrieval-haystack": _retrieval("--haystack", *NEEDLES),
    "tasks": Experiment(
        ("infinigen_jax.evaluate", "tasks"),
        ("--items", "100", "--shots", "5", "--batch", "16", "--budget", "0.1", *TASK_POLICIES),
        chunked=False,
        reads="--data",
    ),
    **{
        f"figures/{name}": Experiment(
            ("benchmarks.figures", name),
            ("--windows", "12", "--batch", "12"),
            chunked=False,
            models=("books-llama", "tiny-opt"),
        )
        for name in FIGURES
    },
}


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.quality", description="Measure quality, all of it.")
    add = parser.add_argument
    add("--text", type=Path, metavar="F", help="the text of all that reads one")
    add("--tasks", type=Path, metavar="DIR", help="folder of the tasks' .jsonl files")
    add("--only", nargs="+", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}")
    add(
        "--models",
        nargs="+",
        default=list(EMBEDDED),
        metavar="M",
        help="names of embedded models or converted folders (default: the embedded ones)",
    )
    add("--out", type=Path, default=RESULTS, metavar="DIR", help="folder of the results")
    add(
        "--renew",
        nargs="+",
        default=[],
        metavar="POLICY",
        help="measure these policies again where there is a result, and keep its other lines",
    )
    add("--tables", action="store_true", help="write the documentation's tables, and measure none")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    if options.tables:
        return run_command(lambda: write_tables(options.out))
    return run_command(lambda: measure(options))


def measure(options: argparse.Namespace) -> None:
    """Run all that is asked for and not there.

    Raises:
        InputError: for a name that does not exist, or an experiment that fails.
    """
    names = options.only or [name for name, each in EXPERIMENTS.items() if not each.asked_for]
    for name in names:
        if name not in EXPERIMENTS:
            raise InputError(f"--only {name}: use {' or '.join(EXPERIMENTS)}")
    files = {name: files_of(EXPERIMENTS[name], options.text, options.tasks) for name in names}
    for name in names:
        for model in options.models:
            run(name, model, files[name], options.out, options.renew)


def files_of(experiment: Experiment, text: Path | None, tasks: Path | None) -> list[Path]:
    """What an experiment reads.

    Raises:
        InputError: if it was not given.
    """
    if experiment.reads is None:
        return []
    if experiment.reads != "--data":
        if text is None:
            raise InputError("--text: give a text")
        return [text]
    if not (found := sorted(tasks.glob("*.jsonl")) if tasks else []):
        raise InputError(f"--tasks {tasks or ''}: give a folder with .jsonl files of tasks")
    return found


def run(name: str, model: str, files: Sequence[Path], out: Path, renew: Sequence[str] = ()) -> None:
    """One experiment with one model, unless there is a result or it is not for this model.

    Args:
        files: that it reads.
        renew: policies that are measured again where there is one.
    """
    experiment, own = EXPERIMENTS[name], Path(model).name
    if experiment.models is not None and own not in experiment.models:
        return
    result = out / f"{name if name.endswith(own) else f'{name}-{own}'}.json"
    again = only_policies(experiment.arguments, renew) if result.exists() else None
    if result.exists() and not again:
        note(f"{result}: there already")
        return
    folder = model_folder(model)
    result.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        measured = result
        if again:
            measured = Path(made) / result.name
            experiment = dataclasses.replace(experiment, arguments=again)
        if experiment.conversion:
            source, folder = folder, Path(made) / own
            given = ["--dtype", "bfloat16", *experiment.conversion]
            if BROKEN in given:
                text = Path(made) / "calibration.txt"
                text.write_text(with_broken_lines(DEFAULT_TEXT.read_text(), LINE))
                given[given.index(BROKEN)] = str(text)
            call(["infinigen_jax.convert", str(source), str(folder), *given])
        call(experiment.command(folder, files, read_config(folder)[1].max_positions, measured))
        if again:
            new = json.loads(measured.read_text())
            try:
                write_json("--out", result, renewed(json.loads(result.read_text()), new))
            except InputError as error:
                kept = result.with_suffix(".new.json")
                write_json("--out", kept, new)
                raise InputError(f"{result}: {error} (what was measured is in {kept})") from None


def call(command: list[str]) -> None:
    """Run a module of this Python; its output is for whoever waits.

    Raises:
        InputError: if it fails.
    """
    note(" ".join(["python -m", *command]))
    status = subprocess.run([sys.executable, "-m", *command], check=False, stdout=sys.stderr)
    if status.returncode:
        raise InputError(f"python -m {command[0]}: failed with status {status.returncode}")


if __name__ == "__main__":
    sys.exit(main())
