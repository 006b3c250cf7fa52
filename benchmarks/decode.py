"""Tokens per second of decoding: this package's policies and schedules, and transformers.

    python -m benchmarks.decode --shape llama --contexts 1024 4096 16384

One random model, the same weights and prompts in every system (their logits are compared first).
All systems of a context are alive at once and take turns, round by round, so that whatever else the
machine does reaches all alike; a figure is the median over the rounds. Not timed: reading the
prompts, and the rounds that warm up, in which programs are compiled.
"""

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks import machine, shapes
from benchmarks.physics import offloaded_traffic, resident_traffic
from benchmarks.systems import MARGIN, WARMUP_ROUNDS, Ours, System, Transformers
from infinigen_jax.checkpoint import DTYPES, Model
from infinigen_jax.compilations import compilations
from infinigen_jax.engine import Engine
from infinigen_jax.policies import Full, InfiniGen, Policy

RESULTS = Path(__file__).resolve().parent / "results"
OURS = ("full-fused", "full-layerwise", "infinigen-fused", "infinigen-layerwise")
THEIRS = ("transformers", "transformers-static")
PRESETS: dict[str, dict[str, Any]] = {
    # The paper's figure 14: OPT-13B, 20 sequences, 1920 tokens of prompt, a cap of 20 %.
    "paper": {
        "shape": "opt-13b",
        "contexts": [1920],
        "batch": 20,
        "dtype": "float16",
        "budget": 0.2,
    },
    "llama8b": {
        "shape": "llama-8b",
        "contexts": [16384, 32768],
        "batch": 8,
        "dtype": "bfloat16",
    },
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description="Measure decoding speed."
    )
    parser.add_argument("--preset", choices=PRESETS, help="settings for a large GPU")
    parser.add_argument("--shape", choices=shapes.SHAPES, default="llama", help="of the model")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--batch", type=int, default=1, help="sequences (default 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--tokens", type=int, default=32, help="timed in a round (default 32)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--budget", type=float, default=0.05, help="of infinigen (default 0.05)")
    parser.add_argument("--alpha", type=float, default=4.0, help="of infinigen (default 4)")
    parser.add_argument("--systems", nargs="+", choices=OURS + THEIRS, default=OURS + THEIRS)
    parser.add_argument(
        "--torch-threads", type=int, default=0, help="default: one, or all cores, if that is faster"
    )
    parser.add_argument("--json", type=Path, help="result file (default: in benchmarks/results)")
    parser.add_argument("--plot", type=Path, help="also draw the figures into this file")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    options, _ = parser.parse_known_args(argv)
    parser.set_defaults(**PRESETS.get(options.preset, {}))
    options = parser.parse_args(argv)
    result = measure(options)
    print(table(result))
    path = options.json or RESULTS / f"decode-{options.shape}-{result['device']}.json"
    write_json(path, result)
    print(f"written to {path}", file=sys.stderr)
    if options.plot:
        from benchmarks.plot import draw

        draw([result], options.plot)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the result file holds."""
    shape = shapes.SHAPES[options.shape]
    total = (options.rounds + WARMUP_ROUNDS) * (options.tokens + MARGIN) + 1
    settings = shape.settings(max(options.contexts) + total + 1)
    model = shapes.peaked_model(shape, settings["max_position_embeddings"], options.dtype)
    size = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    note(f"{shape.name}: {size:,} parameters, {options.dtype}")
    other, difference = None, None
    if set(options.systems) & set(THEIRS):
        from benchmarks.systems import logits_difference, torch_model

        other = torch_model(model, settings)
        difference = logits_difference(model, other, shapes.prompt(model.config, 64))
        note(f"logits differ from transformers' by {difference:.1e} of the largest")
    bandwidths = machine.memory_read_bandwidth(), machine.host_to_device_bandwidth()
    described = machine.describe()
    return {
        "benchmark": "decode",
        "device": described["device"].partition(":")[0],
        "machine": described,
        "settings": {
            name: getattr(options, name)
            for name in "shape batch dtype tokens rounds budget alpha systems".split()
        },
        "model": settings,
        "score_deviation": shapes.SCORE_DEVIATION,
        "logits_relative_difference": difference,
        "memory_read_bytes_per_second": bandwidths[0],
        "host_to_device_bytes_per_second": bandwidths[1],
        "contexts": [
            measure_context(options, model, other, context, total, bandwidths)
            for context in options.contexts
        ],
    }


def measure_context(
    options: argparse.Namespace,
    model: Model,
    other: Any,
    context: int,
    total: int,
    bandwidths: tuple[float, float | None],
) -> dict[str, Any]:
    """All systems at one length of prompt, taking turns."""
    prompts = [shapes.prompt(model.config, context, seed) for seed in range(options.batch)]
    systems: dict[str, System] = {}
    for name in options.systems:
        if name in OURS:
            note(f"{context} tokens: {name} reads the prompt")
            engine = Engine(model, policy=policy(name, options), schedule=name.split("-")[1])
            systems[name] = Ours(engine, prompts, total)
    if wanted := [name for name in options.systems if name in THEIRS]:
        from benchmarks.systems import start_transformers

        note(f"{context} tokens: transformers reads the prompt")
        systems |= start_transformers(other, prompts, total, wanted, options.torch_threads)
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for system in systems.values():
        system.warm_up(options.tokens)
    compiled = compilations()
    for number in range(options.rounds):
        order = list(systems)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            seconds[name].append(systems[name].round(options.tokens))
    gc.collect()
    middle = context + total // 2
    reference = systems.get("transformers") or systems[next(iter(systems))]
    return {
        "context": context,
        "compilations_after_warmup": compilations() - compiled,
        "systems": {
            name: times(system, seconds[name], reference, options)
            | floor(system, options.batch, model, middle, bandwidths)
            for name, system in systems.items()
        },
    }


def policy(name: str, options: argparse.Namespace) -> Policy:
    """The policy of one of our systems."""
    if name.startswith("full"):
        return Full()
    return InfiniGen(budget=options.budget, alpha=options.alpha)


def times(
    system: System, seconds: list[float], reference: System, options: argparse.Namespace
) -> dict[str, Any]:
    """What a system took."""
    middle = statistics.median(seconds)
    pairs = zip(system.drawn, reference.drawn, strict=False)
    equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(system.drawn))
    entry = {
        "tokens_per_second": options.batch * options.tokens / middle,
        "milliseconds_per_step": 1e3 * middle / options.tokens,
        "round_seconds": seconds,
        "first_tokens_equal_to_reference": equal,
        "fetched_fraction": 1.0,
        "host_to_device_bytes_per_token": 0.0,
    }
    if isinstance(system, Transformers):
        entry["threads"] = system.threads
    if isinstance(system, Ours):
        stats = system.run.stats()
        entry |= {
            "fetched_fraction": stats.fetched_fraction,
            "host_to_device_bytes_per_token": stats.host_to_device_bytes_per_token,
            "prefill_seconds": stats.prefill_seconds,
        }
    return entry


def floor(
    system: System, batch: int, model: Model, context: int, bandwidths: tuple[float, float | None]
) -> dict[str, Any]:
    """The bytes a step has to move, and its least time."""
    if isinstance(system, Ours):
        fraction = system.run.stats().fetched_fraction
        traffic = offloaded_traffic(model, system, context, fraction)
    else:
        traffic = resident_traffic(model, batch, context)
    return {
        "bytes_per_step": dataclasses.asdict(traffic),
        "floor_milliseconds": traffic.floor_ms(*bandwidths),
    }


def table(result: dict[str, Any]) -> str:
    """The result for reading: a line for each context and system."""
    settings, described = result["settings"], result["machine"]
    bandwidth = result["memory_read_bytes_per_second"] / 1e9
    lines = [
        f"{settings['shape']}, batch {settings['batch']}, {settings['dtype']}; {described['cpu']}, "
        f"{described['cores']} cores, {described['device']}; memory read at {bandwidth:.1f} GB/s",
        f"{'context':>8}  {'system':<20} {'tok/s':>8} {'ms/step':>8} {'floor':>8} {'fetched':>8}"
        f" {'vs transformers':>16}",
    ]
    for context in result["contexts"]:
        speeds = {n: e["tokens_per_second"] for n, e in context["systems"].items()}
        best = max((speeds[name] for name in THEIRS if name in speeds), default=None)
        for name, entry in context["systems"].items():
            ratio = f"{entry['tokens_per_second'] / best:.2f}x" if best else ""
            lines.append(
                f"{context['context']:>8}  {name:<20} {entry['tokens_per_second']:>8.1f} "
                f"{entry['milliseconds_per_step']:>8.2f} {entry['floor_milliseconds']:>8.2f} "
                f"{entry['fetched_fraction']:>8.4f} {ratio:>16}"
            )
    return "\n".join(lines)


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, path)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
