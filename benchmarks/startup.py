"""Time from the start of a process to the end of a run of four tokens, cold and warm.

    python -m benchmarks.startup --layers 30 60 --json benchmarks/results/startup-cpu.json
    python -m benchmarks.startup --model DIR --text F --prompts 32 7680 --gguf FILE

The first one writes and converts a random model in LLaMA's shape (d 576, 9 query and 3 KV heads of
64). The second one takes a converted model to its first token, and measures peak memory as well;
with its GGUF file also of llama.cpp, which has no cold start.
Each run is a process of its own: `cold` begins with an empty cache of programs, `warm` with the
cache that a run before it left. Processor seconds hardly depend on what else the machine does; wall
seconds do.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.files import write_json
from benchmarks.llama_cpp import KINDS, converted
from benchmarks.machine import describe
from benchmarks.processes import usage_of
from benchmarks.shapes import text_tokens
from infinigen_jax.checkpoint.tensor_names import expected
from infinigen_jax.convert.__main__ import main as convert
from infinigen_jax.models import blueprint, config_from_hf
from infinigen_jax.text.tokenizer import load_tokenizer

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path, layers: int) -> None:
    """Write a random checkpoint in Hugging Face's layout; weights are normal, 1/sqrt(fan in)."""
    random = np.random.default_rng(0)
    shape = SHAPE | {"num_hidden_layers": layers}

    def values(size: tuple[int, ...]) -> np.ndarray:
        if len(size) == 1:  # of a norm
            return np.ones(size, np.float32)
        return (random.standard_normal(size) * size[1] ** -0.5).astype(np.float32)

    specs = expected(blueprint(config_from_hf(shape), "float32")).flat()
    tensors = {spec.name: values(spec.shape) for spec in specs}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    embedded = Path(__file__).parents[1] / "infinigen_jax" / "embedded" / "books-llama"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((embedded / name).read_bytes())


def timed_run(model: Path, programs: Path, arguments: list[str]) -> dict[str, float]:
    """Return wall and processor seconds of one `generate` process, and its peak bytes."""
    command = ["infinigen_jax.generate", "--model", str(model), "--ignore-eos", "--quiet"]
    return usage_of([*command, *arguments], programs, stdout=subprocess.DEVNULL)


def cold_and_warm(
    model: Path, folder: Path, repeats: int, arguments: list[str]
) -> dict[str, float]:
    """Return medians of cold and warm runs."""
    record, runs = {}, {"cold": [], "warm": []}
    for i in range(repeats):
        for kind, results in runs.items():
            results.append(timed_run(model, folder / f"programs-{i}", arguments))
            print(f"{model.name}, {kind}: {results[-1]}", file=sys.stderr, flush=True)
    for kind, results in runs.items():
        for name in results[0]:
            record[f"{kind}_{name}"] = median(result[name] for result in results)
    return record


def measure(folder: Path, layers: int, repeats: int, arguments: list[str]) -> dict[str, float]:
    """Four tokens of a random model."""
    source, model = folder / f"source-{layers}", folder / f"model-{layers}"
    write_model(source, layers)
    if convert([str(source), str(model)]):
        raise SystemExit("the conversion failed")
    given = ["--prompt", "Once upon a time", "--max-new-tokens", "4", *arguments]
    record = cold_and_warm(model, folder / f"of-{layers}", repeats, given)
    for kind in ("cold", "warm"):
        del record[f"{kind}_peak_bytes"]  # a child's peak starts at its parent's
    return {"layers": layers} | record


def measure_given(folder: Path, chosen: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """The first token after a prompt of about `tokens` tokens, of a converted model."""
    tokenizer, file = load_tokenizer(chosen.model), folder / f"prompt-{tokens}.txt"
    file.write_text(tokenizer.decode(text_tokens(tokenizer, chosen.text, tokens)))
    given = ["--raw", "--prompt-file", str(file), "--max-new-tokens", "1", *chosen.arguments]
    found = cold_and_warm(chosen.model, folder / f"of-{tokens}", chosen.repeats, given)
    record: dict[str, Any] = {"prompt_tokens": tokens} | found
    if chosen.gguf:
        ids = folder / f"prompt-{tokens}.json"
        ids.write_text(json.dumps(tokenizer.encode(file.read_text())))
        for name in ("llama.cpp", "llama.cpp-f32"):
            record[name] = start_of_llama_cpp(chosen.gguf, name, ids, chosen.repeats)
    return record


def start_of_llama_cpp(gguf: Path, name: str, ids: Path, repeats: int) -> dict[str, float]:
    """Return medians of processes that load a GGUF file and draw the first token after a prompt."""
    weights, _ = KINDS[name]
    folder = ids.parent
    if weights is not None:
        converted(gguf, weights, folder)
    command = ["benchmarks.llama_cpp", str(gguf), name, str(ids), str(folder)]
    runs = [usage_of(command, folder, stderr=subprocess.DEVNULL) for _ in range(repeats)]
    print(f"{name}: {runs}", file=sys.stderr, flush=True)
    return {key: median(run[key] for run in runs) for key in runs[0]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[30, 60])
    parser.add_argument("--model", type=Path, metavar="DIR", help="a converted model instead")
    parser.add_argument("--text", type=Path, metavar="F", help="text of its prompts")
    parser.add_argument("--prompts", type=int, nargs="+", default=[32], metavar="N")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="its file, for llama.cpp")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="F")
    parser.add_argument("arguments", nargs="*", help="further arguments of generate, after --")
    chosen = parser.parse_args(argv)
    if chosen.model and not chosen.text:
        parser.error("--model: give --text as well")
    with tempfile.TemporaryDirectory() as folder:
        if chosen.model:
            results = [measure_given(Path(folder), chosen, n) for n in chosen.prompts]
        else:
            given = chosen.repeats, chosen.arguments
            results = [measure(Path(folder), layers, *given) for layers in chosen.layers]
    record = {"machine": describe(), "results": results}
    if chosen.model:
        record["model"] = chosen.model.name
    print(json.dumps(results, indent=1))
    if chosen.json:
        write_json(chosen.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
