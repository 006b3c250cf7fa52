"""Time from the start of a process to the end of a run of four tokens, cold and warm.

    python -m benchmarks.startup --layers 30 60 --json benchmarks/results/startup-cpu.json
    python -m benchmarks.startup --model DIR --text F --prompts 32 7680 --gguf FILE

The first one converts a random model in LLaMA's shape (d 576, 9 query and 3 KV heads of 64). The
second one runs a converted model for `--new-tokens` tokens, and llama.cpp, with its GGUF file, for
one.
Each run is a process, whose peak memory is measured: `cold` begins with an empty user cache,
`warm` with that of an earlier run. Processor seconds hardly depend on the machine's other load.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.llama_cpp import CACHES, converted
from benchmarks.machine import describe, note, write_json
from benchmarks.shapes import llama, text_tokens
from infinigen_jax.convert.__main__ import main as convert
from infinigen_jax.loading.load import embedded
from infinigen_jax.text.tokenizer import load_tokenizer

# Starts a process from a small one: the peak of a process begins at that of the one it came from.
LAUNCHER = """
import json, resource, subprocess, sys, time
start = time.perf_counter()
status = subprocess.call(sys.argv[2:])
wall = time.perf_counter() - start
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
with open(sys.argv[1], "w") as file:
    json.dump([wall, usage.ru_utime, usage.ru_stime, usage.ru_maxrss], file)
sys.exit(status)
"""


def usage_of(command: Iterable[str], cache: str | Path, **settings: Any) -> dict[str, float]:
    """Run `python -m command`; return its wall seconds, processor seconds and peak bytes.

    `cache` is the user's cache folder of the process. Raise SystemExit if the command fails.
    """
    whole = [sys.executable, "-m", *command]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    with tempfile.NamedTemporaryFile() as result:
        launched = [sys.executable, "-S", "-c", LAUNCHER, result.name, *whole]
        if subprocess.call(launched, env=environment, **settings):
            raise SystemExit(f"{' '.join(whole)}: failed")
        wall, user, system, peak = json.load(result)
    return {
        "wall_seconds": wall,
        "processor_seconds": user + system,
        "peak_bytes": peak * 1024,
    }


def cold_and_warm(
    model: Path, folder: Path, repeats: int, arguments: list[str]
) -> dict[str, float]:
    """Return medians of cold and warm `generate` processes: their seconds and peak bytes."""
    command = ["infinigen_jax.generate", "--model", str(model), "--ignore-eos", "--quiet"]
    runs: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for i in range(repeats):
        for kind, results in runs.items():
            programs = folder / f"programs-{i}"
            results.append(usage_of([*command, *arguments], programs, stdout=subprocess.DEVNULL))
            note(f"{model.name}, {kind}: {results[-1]}")
    return {
        f"{kind}_{name}": value
        for kind, results in runs.items()
        for name, value in medians(results).items()
    }


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(run[name] for run in runs) for name in runs[0]}


def measure(folder: Path, layers: int, repeats: int) -> dict[str, float]:
    """Measure four tokens of a random model in Hugging Face's layout, after its conversion."""
    import transformers

    source, model = folder / f"source-{layers}", folder / f"model-{layers}"
    shape = llama(576, layers, 9, 3, 1536, 8192)
    shape |= {"max_position_embeddings": 8192, "tie_word_embeddings": True}
    shape |= {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 576**-0.5}
    config = transformers.AutoConfig.for_model(**shape)
    transformers.set_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((embedded("books-llama") / name).read_bytes())
    if convert([str(source), str(model)]):
        raise SystemExit("the conversion failed")
    given = ["--prompt", "Once upon a time", "--max-new-tokens", "4"]
    return {"layers": layers} | cold_and_warm(model, folder / f"of-{layers}", repeats, given)


def measure_given(folder: Path, chosen: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Measure a converted model's new tokens after a prompt of about `tokens` tokens."""
    tokenizer, file = load_tokenizer(chosen.model), folder / f"prompt-{tokens}.txt"
    file.write_text(tokenizer.decode(text_tokens(tokenizer, chosen.text, tokens)))
    given = ["--raw", "--prompt-file", str(file), "--max-new-tokens", str(chosen.new_tokens)]
    found = cold_and_warm(chosen.model, folder / f"of-{tokens}", chosen.repeats, given)
    record: dict[str, Any] = {"prompt_tokens": tokens, "new_tokens": chosen.new_tokens} | found
    if chosen.gguf:
        ids = folder / f"prompt-{tokens}.json"
        ids.write_text(json.dumps(tokenizer.encode(file.read_text())))
        for name in CACHES:
            converted(chosen.gguf, name)  # untimed
            command = ["benchmarks.llama_cpp", str(chosen.gguf), name, str(ids)]
            runs = [
                usage_of(command, folder, stderr=subprocess.DEVNULL) for _ in range(chosen.repeats)
            ]
            note(f"{name}: {runs}")
            record[name] = medians(runs)
    return record


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[30, 60])
    parser.add_argument("--model", type=Path, metavar="DIR", help="a converted model instead")
    parser.add_argument("--text", type=Path, metavar="F", help="text of its prompts")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32], metavar="N")
    parser.add_argument("--new-tokens", type=int, default=1, metavar="N", help="after each prompt")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="its file, for llama.cpp")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="F")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    chosen = parser.parse_args(argv)
    if chosen.model and not chosen.text:
        parser.error("--model: give --text as well")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen.model:
            results = [measure_given(folder, chosen, tokens) for tokens in chosen.prompts]
        else:
            results = [measure(folder, layers, chosen.repeats) for layers in chosen.layers]
    record = {"machine": describe(), "results": results}
    if chosen.model:
        record["model"] = chosen.model.name
    print(json.dumps(results, indent=1))
    if chosen.json:
        write_json(chosen.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
