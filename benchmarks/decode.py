"""Decode benchmark: speed of this package's policies and schedules, and of transformers.

    python -m benchmarks.decode --preset cpu
    python -m benchmarks.decode --shape llama --contexts 1024 4096 --systems infinigen transformers
    python -m benchmarks.decode --model FOLDER --gguf FILE --text book.txt --contexts 1024 8192

All systems use one model, random or real, with the same weights and prompts; the logits of this
package and of transformers are compared first. `--weight-dtype` then makes the weights of this
package small.
`benchmarks.measure` describes the timing, `python -m benchmarks.decode --help` lists the systems. A
JSON file is written after every set of systems, and a Markdown table at the end.

On a GPU, JAX and PyTorch both keep memory once allocated, so measure this package and transformers
in two processes, as `benchmarks.on_gpu` does.
"""

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks import machine, presets, shapes
from benchmarks.files import note, write_json
from benchmarks.measure import measure_context
from benchmarks.physics import cache_bytes, weight_bytes
from benchmarks.report import table
from benchmarks.systems import new_tokens
from benchmarks.waves import Bench
from infinigen_jax.cache.host_array import Placement, default_mesh
from infinigen_jax.errors import run_command
from infinigen_jax.loading.load import Model, load
from infinigen_jax.machine.backend import claim_memory
from infinigen_jax.machine.memory_limits import tree_bytes
from infinigen_jax.planner import bandwidths

SETTINGS = (
    "preset shape batch dtype weight_dtype tokens rounds warmup steps budget budget_rows alpha "
    "systems"
).split()
LOGITS_PROMPT = 64  # tokens of the prompt that compares the two models


def main(argv: list[str] | None = None) -> int:
    options = presets.parse(argv)
    name = options.preset or ("decode" if options.model else f"decode-{options.shape}")
    path = options.json or machine.result_path(name, options.model)
    if machine.has_gpu() and set(options.systems) & set(presets.THEIRS):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the GPU
    claim_memory()

    def run() -> None:
        print(table(measure(options, path)))
        note(f"written to {path}")

    return run_command(run)


def measure(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Measure all contexts and return the result, which is written as it grows."""
    if jax.default_backend() == "cpu":
        # The trace would confuse cached programs, whose numbers repeat.
        jax.config.update("jax_enable_compilation_cache", False)
    began = time.monotonic()
    model, config = shapes.model_of(options, max(options.contexts) + new_tokens(options) + 2)
    other, difference = None, None
    if set(options.systems) & set(presets.THEIRS):
        other, difference = _other(model, config)
    if options.weight_dtype:
        del model  # no two in memory
        model = load(options.model, dtype=options.dtype, weight_dtype=options.weight_dtype)
    # Place them where engines want them, or each engine would make a copy.
    placed = jax.device_put(model.params, Placement(default_mesh()).whole)
    model = dataclasses.replace(model, params=placed)
    rates = machine.memory_read_bandwidth(), bandwidths.host_to_device_bandwidth()
    described = machine.describe()
    sizes = {
        "parameter_bytes": tree_bytes(model.params),
        "weight_bytes_per_step": weight_bytes(model),
        "cache_bytes_per_token": cache_bytes(model, 1, 1),
    }
    result: dict[str, Any] = {
        "benchmark": "decode",
        "device": described["device"].partition(":")[0],
        "machine": described,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "model": {"name": options.model and Path(options.model).name} | config | sizes,
        "score_deviation": shapes.SCORE_DEVIATION,
        "common_share_of_queries": shapes.COMMON,
        "logits_relative_difference": difference,
        "memory_read_bytes_per_second": rates[0],
        "host_to_device_bytes_per_second": rates[1],
        "contexts": [],
    }
    bench = Bench(options, model, other, rates, began + options.cap_seconds)
    for number, context in enumerate(options.contexts):
        for entry in measure_context(bench, context):
            result["contexts"][number:] = [entry]
            result["seconds"] = time.monotonic() - began
            write_json(path, result)
    return result


def _other(model: Model, config: dict[str, Any]) -> tuple[Any, float]:
    """Return transformers' model, and the relative difference of its logits from ours."""
    from benchmarks.torch_systems import LOGITS_TOLERANCE, logits_difference, torch_model

    other = torch_model(model, config)
    difference = logits_difference(model, other, shapes.prompt(model.config, LOGITS_PROMPT))
    note(f"logits differ from transformers' by {difference:.1e} of the largest")
    if not difference <= LOGITS_TOLERANCE[str(model.dtype)]:
        note("that is more than rounding explains: THE MODELS ARE NOT THE SAME")
    return other, difference


if __name__ == "__main__":
    sys.exit(main())
