"""Decode benchmark: speed of this package's policies and schedules, and of transformers.

    python -m benchmarks.decode --preset cpu
    python -m benchmarks.decode --shape llama --contexts 1024 4096 --systems infinigen transformers
    python -m benchmarks.decode --model FOLDER --gguf FILE --text book.txt --contexts 1024 8192

All systems use one model, random or real, with the same weights and prompts; the logits of this
package and of transformers are compared first. `benchmarks.measure` describes the timing, --help
lists the systems. On a GPU, JAX and PyTorch both keep memory once allocated, so measure this
package and transformers in two processes, as `benchmarks.on_gpu` does.
"""

import argparse
import dataclasses
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks import machine, shapes
from benchmarks.machine import note, write_json
from benchmarks.measure import Bench, cache_bytes, measure_context, weight_bytes
from benchmarks.systems import LLAMA_CPP, SYSTEMS, THEIRS, new_tokens
from benchmarks.tables import entry_table
from benchmarks.trace import PARTS
from infinigen_jax.cache.host_array import Placement, default_mesh
from infinigen_jax.cli.options import read_policy
from infinigen_jax.errors import InputError, run_command
from infinigen_jax.loading.load import DTYPES, load
from infinigen_jax.machine.backend import claim_memory
from infinigen_jax.machine.memory_limits import tree_bytes
from infinigen_jax.numeric import whole_number
from infinigen_jax.planner import bandwidths
from infinigen_jax.settings.engine import WEIGHT_DTYPES

SETTINGS = (
    "preset shape batch dtype weight_dtype tokens rounds warmup steps budget_rows systems"
).split()
PRESETS = {
    "smoke": "--shape toy --contexts 320 640 --tokens 3 --rounds 2 --warmup 1 --steps 6 "
    "--budget-rows 16",
    "cpu": "--contexts 4096 16384 32768",
    # bfloat16 has the size of the paper's float16, and random weights do not overflow it. Four
    # rounds of 32 tokens are the paper's 128 new tokens.
    "paper": "--shape opt-13b --contexts 1920 --batch 20 --dtype bfloat16 --rounds 4 --warmup 1 "
    "--steps 40",
    "llama8b": "--shape llama-8b --contexts 16384 32768 --batch 8 --dtype bfloat16 --tokens 16 "
    "--rounds 3 --warmup 1 --steps 40",
}
SPEEDS = {
    "system": ("system", "{}"),
    "tok/s": ("tokens_per_second", "{:.1f}"),
    "ms/step": ("milliseconds_per_step", "{:.2f}"),
    "floor ms": ("floor_milliseconds", "{:.2f}"),
    "over floor": ("time_over_floor", "{:.2f}"),
    "selected": ("selected_fraction", "{:.2%}"),
    "fetched": ("fetched_fraction", "{:.2%}"),
    "hit rate": ("hot_set_hit_rate", "{:.2f}"),
    "bytes/token": ("host_to_device_bytes_per_token", "{:.3g}"),
    "link": ("link_share", "{:.1%}"),
    "memory": ("memory_share", "{:.1%}"),
    "p50": ("single_steps.p50_ms", "{:.2f}"),
    "p99": ("single_steps.p99_ms", "{:.2f}"),
    "max": ("single_steps.max_ms", "{:.2f}"),
    "flush": ("single_steps.flush_over_median", "{:.2f}x"),
    "Python ms": ("dispatch_ms", "{:.2f}"),
}
BREAKDOWN = {
    "system": ("system", "{}"),
    "step": ("breakdown.step_ms", "{:.2f}"),
    **{part: (f"breakdown.{part}", "{:.2f}") for part in PARTS},
    "transfers": ("breakdown.transfer_ms", "{:.2f}"),
    "hidden": ("breakdown.hidden_share", "{:.0%}"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode",
        description="Measure the speed of decoding: this package and transformers, taking turns.",
        epilog="systems:\n"
        + "\n".join(f"  {name:<24} {text}" for name, text in SYSTEMS.items())
        + "\n  infinigen:KEY=VALUE,...  infinigen with other settings of the policy",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, count = parser.add_argument, whole_number(1)
    add("--preset", choices=PRESETS, help="named settings; further options override them")
    add("--shape", choices=shapes.SHAPES, default="llama", help="shape of the random model")
    add("--model", metavar="M", help="a real model in place of a random one; needs --text")
    add("--gguf", type=Path, metavar="FILE", help="file of the same model, for llama.cpp")
    add("--text", type=Path, metavar="FILE", help="text of the prompts of a real model")
    add("--contexts", type=count, nargs="+", default=[1024, 4096, 16384], metavar="N")
    add("--batch", type=count, default=1, help="sequences (default 1)")
    add("--dtype", choices=DTYPES, default="float32")
    add("--weight-dtype", choices=WEIGHT_DTYPES, help="small weights of --model, ours alone")
    add("--systems", nargs="+", type=system, default=list(SYSTEMS), metavar="NAME")
    add("--tokens", type=count, default=32, help="tokens timed per round (default 32)")
    add("--rounds", type=count, default=5, help="timed rounds (default 5)")
    add("--warmup", type=int, default=3, help="untimed rounds before the timed ones (default 3)")
    text = "single steps timed after the rounds; more than `window` include a flush (default 80)"
    add("--steps", type=count, default=80, help=text)
    add("--trace-steps", type=int, default=4, help="steps traced by the profiler; 0: no breakdown")
    add("--budget-rows", type=count, default=256, help="rows of infinigen-fixed (default 256)")
    add("--cap-seconds", type=float, default=math.inf, help="time after which nothing starts")
    add("--json", type=Path, help="result file (default: benchmarks/results/PRESET-DEVICE.json)")
    return parser


def system(name: str) -> str:
    """Return a name if it is one of SYSTEMS, or "infinigen:" and settings."""
    if name not in SYSTEMS:
        try:
            kind, settings = read_policy(name)
            if kind.name != "infinigen" or not settings:
                raise InputError(f"{name}: use {', '.join(SYSTEMS)} or infinigen:KEY=VALUE,...")
            kind(**settings)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return name


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options, those of a preset first."""
    parser = build_parser()
    given = sys.argv[1:] if argv is None else argv
    preset = parser.parse_known_args(given)[0].preset
    options = parser.parse_args([*PRESETS.get(preset, "").split(), *given])
    if options.model and not options.text:
        parser.error("--model: give --text as well, for the prompts")
    if options.weight_dtype and not options.model:
        parser.error("--weight-dtype: give --model as well")
    if set(options.systems) & set(LLAMA_CPP) and not options.gguf:
        options.systems = [name for name in options.systems if name not in LLAMA_CPP]
        if not options.systems:
            parser.error("--systems: llama.cpp needs --gguf")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    name = options.preset or ("decode" if options.model else f"decode-{options.shape}")
    path = options.json or machine.result_path(name, options.model)
    if machine.has_gpu() and set(options.systems) & set(THEIRS):
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
    if set(options.systems) & set(THEIRS):
        from benchmarks.torch_systems import same_model

        other, difference = same_model(model, config)
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


def title(result: dict[str, Any]) -> str:
    settings = result["settings"]
    model = result["model"].get("name") or f"{settings['shape']} shape"
    small = settings.get("weight_dtype")
    weights = f", weights {small}" if small else ""
    return f"{model}, batch {settings['batch']}, {settings['dtype']}{weights}"


def table(result: dict[str, Any]) -> str:
    described, link = result["machine"], result["host_to_device_bytes_per_second"]
    lines = [
        f"{title(result)}; "
        f"{described['cpu']}, {described['cores']} cores, {described['device']}; memory read at "
        f"{result['memory_read_bytes_per_second'] / 1e9:.1f} GB/s"
        + (f", host to device at {link / 1e9:.1f} GB/s" if link else "")
        + f"; {described['date']}, commit {(described['commit'] or 'unknown')[:12]}"
    ]
    for context in result["contexts"]:
        entries = [{"system": name} | entry for name, entry in context["systems"].items()]
        absent = [
            f"- {entry['system']}: {entry['absent']}, {entry['reason']}"
            for entry in entries
            if "absent" in entry
        ]
        traced = [
            entry | {"breakdown": entry["breakdown"] | entry["breakdown"]["parts_ms"]}
            for entry in entries
            if "breakdown" in entry
        ]
        lines += ["", f"### {context['context']} tokens of context", ""]
        lines += [entry_table(SPEEDS, entries), "", *absent]
        if traced:
            lines += ["", "Milliseconds of a step, traced:", "", entry_table(BREAKDOWN, traced)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
