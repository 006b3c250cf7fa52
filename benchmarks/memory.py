"""Comparison of the memory plan with the memory used: `python -m benchmarks.memory`.

Each case runs in a separate process, twice with the same shapes: the first run compiles, the second
is measured. On the CPU the measure is the high-water mark of the process's resident memory, less
its memory before the weights; on a GPU it is the allocator's peak. The result is
benchmarks/results/memory-cpu.json or memory-gpu.json.
"""

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from benchmarks.machine import describe, note, result_path, write_json
from benchmarks.shapes import SHAPES, peaked_model, prompt
from infinigen_jax.cli.options import add_engine_options, make_engine, make_policy
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.memory_plan import MemoryPlan
from infinigen_jax.machine.memory_limits import tree_bytes

# Return freed memory to the system immediately, so that it does not count later.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Generation: a shape of benchmarks.shapes, prompts, and the options of `generate`."""

    name: str
    shape: str
    prompt: int  # tokens of each
    batch: int = 1  # number of prompts
    at_once: int | None = None  # those that are decoded concurrently; None: all
    prefix: int = 0  # tokens that all prompts begin with
    new_tokens: int = 32
    dtype: str = "float32"
    options: tuple[str, ...] = ()


# Prompt and new tokens fill the cache: on the CPU unused rows would take no memory.
HOST = ("--hot-set=2", "--dense-layers=0")
SMALL = ("--rows=int8", "--policy=infinigen:index_dtype=float32")
CASES = (
    Case("long prompt", "llama", 4064),
    Case("batch of 8", "llama", 480, batch=8),
    Case("hot set, all layers on the host", "llama", 2016, options=HOST),
    Case("int8 rows, float32 index", "llama", 2016, options=SMALL),
    Case("bfloat16, wide budget, OPT", "opt", 2016, dtype="bfloat16", options=("--budget=0.5",)),
    Case("streamed", "llama", 2016, options=("--policy=full",)),
    Case("all on the device", "llama", 2016, options=("--dense-layers=8",)),
    Case("weights on the host, too", "llama", 2016, options=("--weights=host", "--dense-layers=0")),
    Case("prefix, 6 prompts", "llama", 2016, batch=6, prefix=1984),
    Case("prefix, 2 prompts", "llama", 2016, batch=2, prefix=1984),
    Case("prefix, 2 of 4 together", "llama", 2016, batch=4, at_once=2, prefix=1984),
    Case("2 of 4 together", "llama", 2016, batch=4, at_once=2),
    Case(
        "pool, 2 of 4 together", "llama", 2016, batch=4, at_once=2, options=("--pool-tokens=50%",)
    ),
)


def main() -> int:
    """Measure all cases in separate processes, or one case in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="run only this case, here, and print its record")
    only = parser.parse_args().case
    if only is not None:
        print(json.dumps(measure(next(case for case in CASES if case.name == only))))
        return 0
    os.environ |= ENVIRONMENT  # of the processes
    records = []
    for case in CASES:
        note(case.name)
        command = [sys.executable, "-m", "benchmarks.memory", "--case", case.name]
        records.append(json.loads(subprocess.check_output(command).splitlines()[-1]))
        print(f"{case.name:32} {line(records[-1])}", flush=True)
        result = {"machine": describe(), "cases": records}
        write_json(result_path("memory"), result)
    return 0


def line(record: dict[str, Any]) -> str:
    planned, measured = record["planned"], record["measured"]
    return (
        f"planned {planned['total'] / 2**20:8.1f} MiB  measured {measured['total'] / 2**20:8.1f} "
        f"MiB  planned/measured {record['ratio']:.3f}"
    )


def measure(case: Case) -> dict[str, Any]:
    """Generate twice and compare the second run's peak with the plan."""
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    options = parser.parse_args([*case.options, f"--dtype={case.dtype}"])
    model = peaked_model(SHAPES[case.shape], case.prompt + case.new_tokens, case.dtype)
    engine = make_engine(model, make_policy(options), options)
    plan = generate(engine, case)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if jax.default_backend() == "cpu":  # a GPU's peak covers both runs, which are equal
        Path("/proc/self/clear_refs").write_text("5")
    before, weights = in_use(), tree_bytes(engine.runtime.weights)
    generate(engine, case)
    total = weights + in_use(peak=True) - before
    planned = dataclasses.asdict(plan) | {"total": plan.total + weights}
    return {
        "name": case.name,
        "case": dataclasses.asdict(case),
        "planned": planned,
        "measured": {"weights": weights, "total": total},
        "ratio": planned["total"] / total,
    }


def generate(engine: Engine, case: Case) -> MemoryPlan:
    """Run a case to its end; return the largest memory plan."""
    config, suffix = engine.model.config, case.prompt - case.prefix
    prefix = prompt(config, case.prefix, case.batch)
    prompts = [[*prefix, *prompt(config, suffix, seed)] for seed in range(case.batch)]
    run = engine.start(
        prompts, max_new_tokens=case.new_tokens, batch=case.at_once, prefix=case.prefix
    )
    for _ in run.tokens(ignore_eos=True):
        pass
    return max(run.phases, key=lambda plan: plan.total)


def in_use(peak: bool = False) -> int:
    """Return the bytes of memory in use, or their high-water mark: resident, or of the GPU."""
    if jax.default_backend() != "cpu":
        statistics = jax.devices()[0].memory_stats() or {}
        return statistics["peak_bytes_in_use" if peak else "bytes_in_use"]
    lines = Path("/proc/self/status").read_text().splitlines()
    name = "VmHWM:" if peak else "VmRSS:"
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


if __name__ == "__main__":
    sys.exit(main())
