"""Speed and acceptance of the lossless mode, next to the full cache and to InfiniGen alone.

    python -m benchmarks.lossless --contexts 4096 16384 --json benchmarks/results/lossless-cpu.json
    python -m benchmarks.lossless --model FOLDER --text book.txt --contexts 1024 7680

All systems continue the same prompt and take turns, so that other load on the machine affects all
alike. A turn lasts until a number of tokens was drawn and the device is idle. `lossless:P` drafts
with policy P within the same budget, `lossless-int4:P` (`-none`) with such weights; tokens are
compared with those of the full cache.
"""

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks import machine, shapes
from benchmarks.machine import note, write_json
from benchmarks.measure import turns
from benchmarks.plots import Panel, checked_plot, draw
from benchmarks.systems import STREAMED
from benchmarks.tables import entry_table
from infinigen_jax.cli.options import read_policy
from infinigen_jax.engine.draft_length import DraftLength
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.generation import Run
from infinigen_jax.errors import Parser, run_command
from infinigen_jax.evaluation.texts import common_length
from infinigen_jax.loading.load import DTYPES, Model
from infinigen_jax.machine.backend import claim_memory

SYSTEMS = ("full", "infinigen", "lossless:infinigen")
TOKENS = 24  # tokens of the first turn, which compiles and is not timed
COLUMNS = {
    "system": ("system", "{}"),
    "tok/s": ("tokens_per_second", "{:.1f}"),
    "over full": ("over_full", "{:.2f}"),
    "accepted": ("acceptance_rate", "{:.1%}"),
    "tokens per verification": ("tokens_per_verification", "{:.2f}"),
    "drafted": ("draft_tokens", "{:.1f}"),
    "draft s": ("draft_seconds", "{:.2f}"),
    "verification s": ("verification_seconds", "{:.2f}"),
    "equal tokens": ("equal_tokens", "{}"),
}


def always_draft(tokens: int | None) -> None:
    """Let every round draft as many tokens, if given: policies are compared by equal drafts."""
    if tokens is not None:
        DraftLength.choose = lambda self, most: min(most, self.most)


class System:
    """Generation in progress; `rates` are tokens per second of each turn."""

    def __init__(self, name: str, model: Model, prompt: list[int], options: argparse.Namespace):
        kind, _, policy = name.partition(":")
        settings: dict[str, Any] = {"weights": options.weights, "policy": STREAMED}
        if name != "full":
            policy_class, given = read_policy(policy or kind)
            budget = {} if options.budget is None else {"budget": options.budget}
            settings["policy"] = policy_class(**(budget | given))
        if kind.startswith("lossless"):
            settings |= {"lossless": True, "draft_tokens": options.draft_tokens}
            settings["draft_weights"] = kind.partition("-")[2] or None
        tokens = TOKENS + options.tokens * options.rounds + 64
        engine = Engine(model, **settings)
        self.run: Run = engine.start([prompt], max_new_tokens=tokens)
        self._tokens, self.drawn = self.run.tokens(ignore_eos=True), list[int]()
        self.rates: list[float] = []
        self.turn(TOKENS)
        self.rates.clear()

    def turn(self, tokens: int) -> None:
        """Draw at least a number of tokens, and wait for everything that was dispatched."""
        began, before = time.perf_counter(), len(self.drawn)
        while len(self.drawn) < before + tokens:
            self.drawn += [token for token in next(self._tokens) if token is not None]
        jax.block_until_ready((self.run.drawn, self.run.cache))
        self.rates.append((len(self.drawn) - before) / (time.perf_counter() - began))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all contexts and return the result, which is written as it grows."""
    always_draft(options.draft_tokens)
    end = time.monotonic() + options.cap_seconds
    path = options.json or machine.result_path("lossless", options.model)
    longest = max(options.contexts) + TOKENS + options.tokens * options.rounds + 128
    model, _ = shapes.model_of(options, longest)
    names = "contexts tokens rounds budget weights dtype draft_tokens systems".split()
    result: dict[str, Any] = {
        "benchmark": "lossless",
        "machine": machine.describe(),
        "model": options.model and Path(options.model).name or f"{options.shape} shape",
        "settings": {name: getattr(options, name) for name in names},
        "contexts": [],
    }
    for number, context in enumerate(options.contexts):
        systems: dict[str, System] = {}  # frees those of the previous context
        (prompt,) = shapes.prompts(model, context, 1, options.text)
        for name in options.systems:
            note(f"{context} tokens: {name}")
            systems[name] = System(name, model, prompt, options)
        for index in range(options.rounds):
            if index and time.monotonic() >= end:
                break
            for name in turns(options.systems, index):
                systems[name].turn(options.tokens)
            result["contexts"][number:] = [{"context": context, "systems": _entries(systems)}]
            write_json(path, result)
    note(f"written to {path}")
    return result


def _entries(systems: dict[str, System]) -> dict[str, Any]:
    full = systems.get("full")
    entries = {}
    for name, system in systems.items():
        stats, rate = system.run.stats(), statistics.median(system.rates)
        entries[name] = {
            **{key: getattr(stats, key) for key, _ in COLUMNS.values() if hasattr(stats, key)},
            "tokens_per_second": rate,
            "all_tokens_per_second": system.rates,
            "policy": str(system.run.decoder.policy),
            "fetched_fraction": stats.fetched_fraction,
        }
        if full is not None:
            same = common_length(system.drawn, full.drawn)
            shorter = min(len(system.drawn), len(full.drawn))
            entries[name]["over_full"] = rate / statistics.median(full.rates)
            entries[name]["equal_tokens"] = f"{same} of {shorter}"
    return entries


def table(result: dict[str, Any]) -> str:
    lines = []
    for context in result["contexts"]:
        entries = [{"system": name} | entry for name, entry in context["systems"].items()]
        lines += [f"### {context['context']} tokens of context", "", entry_table(COLUMNS, entries)]
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m benchmarks.lossless", description="Measure lossless mode.")
    add = parser.add_argument
    add("--shape", choices=shapes.SHAPES, default="llama", help="shape of the random model")
    add("--model", metavar="M", help="a real model in place of a random one; needs --text")
    add("--text", type=Path, metavar="FILE", help="text of the prompt of a real model")
    add("--contexts", type=int, nargs="+", default=[4096, 16384], metavar="N")
    add("--dtype", choices=DTYPES, default="float32")
    add("--systems", nargs="+", default=list(SYSTEMS), metavar="NAME")
    add("--budget", type=float, help="maximum share of rows fetched (default: the policy's)")
    add("--weights", choices=("device", "host"), default="device")
    add("--draft-tokens", type=int, metavar="N", help="tokens per draft (default: by times)")
    add("--tokens", type=int, default=32, help="tokens of a turn (default 32)")
    add("--rounds", type=int, default=3, help="turns of each system (default 3)")
    add("--cap-seconds", type=float, default=math.inf, help="time after which no round starts")
    add("--json", type=Path, help="result file (default: benchmarks/results/lossless-DEVICE.json)")
    add("--plot", metavar="FILE", help="also draw tokens per second into this file")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    if (options.model is None) != (options.text is None):
        parser.error("--model, --text: give both, or neither")
    claim_memory()

    def run() -> None:
        path = checked_plot(options.plot)
        result = measure(options)
        print(table(result))
        if path is not None:
            found = [(each["context"], each["systems"]) for each in result["contexts"]]
            lines = {
                name: [(context, systems[name]["tokens_per_second"]) for context, systems in found]
                for name in options.systems
            }
            panel = Panel("context, tokens", "tokens per second", lines)
            draw(path, [panel], result["model"])

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
