"""Command line of the decode benchmark, and named sets of its settings."""

import argparse
import math
from pathlib import Path
from typing import Any

from benchmarks import shapes
from infinigen_jax.cli.options import read_policy
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import DTYPES
from infinigen_jax.numeric import whole_number
from infinigen_jax.settings.engine import WEIGHT_DTYPES

# Name -> description, in order of priority when time is short.
SYSTEMS = {
    "infinigen": "this package with default settings",
    "full-device": "all rows on the device",
    "infinigen-paper": "the paper's settings: layers 0 and 1 streamed, mean count, no hot set",
    "full-streamed": "all rows on the host, transferred for every token, like FlexGen",
    "transformers": "its default cache, on the device",
    "transformers-static": "its static cache, on the device",
    "transformers-offloaded": "its offloaded cache; needs CUDA",
    "infinigen-int4": "infinigen with 4-bit rows on the host",
    "infinigen-fixed": "infinigen with --budget-rows rows at any context",
    "llama.cpp": "the GGUF file as it is, with an f16 cache",
    "llama.cpp-f16": "the GGUF file with f16 weights and cache",
    "llama.cpp-f32": "the GGUF file with f32 weights and cache",
}
THEIRS = ("transformers", "transformers-static", "transformers-offloaded")
LLAMA_CPP = ("llama.cpp", "llama.cpp-f16", "llama.cpp-f32")

# bfloat16 has the size of the paper's float16, and random weights do not overflow it.
_PAPER: dict[str, Any] = {
    "shape": "opt-13b",
    "contexts": [1920],
    "batch": 20,
    "dtype": "bfloat16",
    "rounds": 4,  # of 32 tokens: the paper's 128 new tokens
    "warmup": 1,
    "steps": 40,
}
PRESETS: dict[str, dict[str, Any]] = {
    "smoke": {
        "shape": "toy",
        "contexts": [96, 192],
        "tokens": 3,
        "rounds": 2,
        "warmup": 1,
        "steps": 6,
        "budget_rows": 16,
    },
    "cpu": {"contexts": [4096, 16384, 32768]},
    "paper": _PAPER,
    "llama8b": {
        "shape": "llama-8b",
        "contexts": [16384, 32768],
        "batch": 8,
        "dtype": "bfloat16",
        "tokens": 16,
        "rounds": 3,
        "warmup": 1,
        "steps": 40,
    },
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
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
    add("--steps", type=count, default=80, help="single steps timed after the rounds (default 80)")
    add("--trace-steps", type=int, default=4, help="steps traced by the profiler; 0: no breakdown")
    add("--budget", type=float, help="maximum share of rows fetched (default: the policy's)")
    add("--budget-rows", type=count, default=256, help="rows of infinigen-fixed (default 256)")
    add("--alpha", type=float, help="alpha of infinigen (default: the policy's)")
    add("--cap-seconds", type=float, default=math.inf, help="time after which nothing starts")
    add("--json", type=Path, help="result file (default: benchmarks/results/PRESET-DEVICE.json)")
    return parser


def system(name: str) -> str:
    """Return a name, one of SYSTEMS or "infinigen:" and settings."""
    if name not in SYSTEMS:
        try:
            kind, settings = read_policy(name)
            if kind.name != "infinigen" or not settings:
                raise InputError(f"{name}: use {', '.join(SYSTEMS)} or infinigen:KEY=VALUE,...")
            kind(**settings)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return name


def is_ours(name: str) -> bool:
    """Return whether a system is this package."""
    return name not in THEIRS and name not in LLAMA_CPP


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options; a preset's settings replace defaults."""
    parser = build_parser()
    options, _ = parser.parse_known_args(argv)
    parser.set_defaults(**PRESETS.get(options.preset, {}))
    options = parser.parse_args(argv)
    if options.model and not options.text:
        parser.error("--model: give --text as well, for the prompts")
    if options.weight_dtype and not options.model:
        parser.error("--weight-dtype: give --model as well")
    if set(options.systems) & set(LLAMA_CPP) and not options.gguf:
        options.systems = [name for name in options.systems if name not in LLAMA_CPP]
    return options
