"""The speed of decoding: this package's policies and schedules, and transformers.

    python -m benchmarks.decode --preset cpu
    python -m benchmarks.decode --shape llama --contexts 1024 4096 --systems infinigen transformers

One random model, the same weights and prompts in every system (their logits are compared first).
`benchmarks/measure.py` tells what is timed, `python -m benchmarks.decode --help` which systems
there are. Writes a JSON file after every set of systems, and at the end a table in Markdown.

On a GPU, JAX and PyTorch would each keep the memory that they once had: there this package and
transformers run one after the other, each in a process of its own.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks import machine, presets, shapes
from benchmarks.files import RESULTS, note, write_json
from benchmarks.measure import measure_context, model_facts
from benchmarks.report import table
from benchmarks.waves import Bench
from infinigen_jax import bandwidths
from infinigen_jax.checkpoint import Model
from infinigen_jax.memory import Placement, default_mesh

SETTINGS = (
    "preset shape batch dtype tokens rounds warmup steps budget budget_rows alpha dense_layers "
    "hot_set transfer device_memory systems"
).split()
LOGITS_PROMPT = 64  # tokens over which the two models are compared


def main(argv: list[str] | None = None) -> int:
    options = presets.parse(argv)
    name = f"{options.preset or 'decode-' + options.shape}-{machine.device_name()}.json"
    path = options.json or RESULTS / name
    families = _families(options)
    if len(families) == 1:
        shares = bool(set(options.systems) & set(presets.THEIRS))
        os.environ |= machine.gpu_environment(shares)
    if len(families) > 1:
        result = _run_apart(options, families, path)
    else:
        result = measure(options, path)
    print(table(result))
    note(f"written to {path}")
    if options.plot:
        from benchmarks.pictures import speeds

        speeds(result, options.plot)
    return 0


def measure(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Everything that the result file holds; it is written as far as it got."""
    if jax.default_backend() == "cpu":
        # Programs loaded from it have numbers that repeat: the trace would take one for another.
        jax.config.update("jax_enable_compilation_cache", False)
    began = time.monotonic()
    deadline = float("inf") if options.cap_seconds is None else began + options.cap_seconds
    shape = shapes.SHAPES[options.shape]
    unlimited = Bench(options, None, None, (1.0, None), deadline, note)  # type: ignore[arg-type]
    config = shape.settings(max(options.contexts) + unlimited.new_tokens + 2)
    model = shapes.peaked_model(shape, config["max_position_embeddings"], options.dtype)
    # Where engines want them: they would otherwise each make a copy.
    placed = jax.device_put(model.params, Placement(default_mesh()).whole)
    model = dataclasses.replace(model, params=placed)
    other, difference = None, None
    if set(options.systems) & set(presets.THEIRS):
        other, difference = _other(model, config)
    rates = machine.memory_read_bandwidth(), bandwidths.host_to_device_bandwidth()
    described = machine.describe()
    result: dict[str, Any] = {
        "benchmark": "decode",
        "device": described["device"].partition(":")[0],
        "machine": described,
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "model": config | model_facts(model),
        "score_deviation": shapes.SCORE_DEVIATION,
        "common_share_of_queries": shapes.COMMON,
        "logits_relative_difference": difference,
        "memory_read_bytes_per_second": rates[0],
        "host_to_device_bytes_per_second": rates[1],
        "contexts": [],
    }
    bench = Bench(options, model, other, rates, deadline, note)
    for context in options.contexts:
        done = result["contexts"]
        for entry in measure_context(bench, context):
            result["contexts"] = [*done, entry]
            result["seconds"] = time.monotonic() - began
            write_json(path, result)
    return result


def _other(model: Model, config: dict[str, Any]) -> tuple[Any, float]:
    """transformers' model, and how far its logits are from ours."""
    from benchmarks.torch_systems import LOGITS_TOLERANCE, logits_difference, torch_model

    other = torch_model(model, config)
    difference = logits_difference(model, other, shapes.prompt(model.config, LOGITS_PROMPT))
    note(f"logits differ from transformers' by {difference:.1e} of the largest")
    if not difference <= LOGITS_TOLERANCE[str(model.dtype)]:
        note("that is more than rounding explains: THE MODELS ARE NOT THE SAME")
    return other, difference


def _families(options: argparse.Namespace) -> list[list[str]]:
    """The systems that share a process."""
    ours = [name for name in options.systems if presets.is_ours(name)]
    theirs = [name for name in options.systems if name in presets.THEIRS]
    apart = options.processes == "family" or (
        options.processes == "auto" and machine.has_gpu() and bool(ours) and bool(theirs)
    )
    return [family for family in (ours, theirs) if family] if apart else [options.systems]


def _run_apart(options: argparse.Namespace, families: list[list[str]], path: Path) -> Any:
    """Each family in a process; the results put together."""
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, family in enumerate(families):
            part = Path(folder) / f"{number}.json"
            left = None
            if options.cap_seconds is not None:
                left = max(0.0, options.cap_seconds - (time.monotonic() - began))
            command = _command(options, family, part, left)
            environment = os.environ | machine.gpu_environment(shares=family[0] in presets.THEIRS)
            code = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
            if code:
                failures.append(f"{', '.join(family)}: status {code}")
                note(f"failed: {failures[-1]}")
            if part.exists():
                results.append(json.loads(part.read_text()))
            if results:
                write_json(path, merge(results, options.systems) | {"failures": failures})
    if not results:
        raise SystemExit(f"no system could be measured: {'; '.join(failures)}")
    return merge(results, options.systems) | {"failures": failures}


def _command(
    options: argparse.Namespace, family: list[str], part: Path, left: float | None
) -> list[str]:
    """The command line that measures a part; every option given, so that no preset is needed."""
    command = [sys.executable, "-m", "benchmarks.decode", "--processes", "one"]
    given = vars(options) | {"systems": family, "json": part, "cap_seconds": left}
    for name, value in given.items():
        if value is None or name in ("processes", "plot"):
            continue
        values = value if isinstance(value, list) else [value]
        command += [f"--{name.replace('_', '-')}", *map(str, values)]
    return command


def merge(results: list[dict[str, Any]], order: list[str]) -> dict[str, Any]:
    """One result out of those of several processes with the same settings."""
    merged = dict(results[0])
    merged["settings"] = merged["settings"] | {"systems": order}
    contexts: dict[int, dict[str, Any]] = {}
    for result in results:
        merged["logits_relative_difference"] = (
            merged["logits_relative_difference"] or result["logits_relative_difference"]
        )
        for entry in result["contexts"]:
            whole = contexts.setdefault(entry["context"], {"waves": [], "systems": {}})
            systems = whole["systems"] | entry["systems"]
            whole |= entry | {"waves": whole["waves"] + entry["waves"]}
            whole["systems"] = {name: systems[name] for name in order if name in systems}
    merged["contexts"] = list(contexts.values())
    merged["seconds"] = sum(result["seconds"] for result in results)
    return merged


if __name__ == "__main__":
    sys.exit(main())
