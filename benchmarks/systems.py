"""Systems of the decode benchmark: their names, and those of this package.

A system starts with prompts and then decodes further tokens, round by round. It measures its own
time, because the extent of a round differs between systems. Contexts grow equally in all.
"""

import argparse
import time
from typing import Any, NamedTuple, Protocol

import jax

from infinigen_jax.cli.options import read_policy
from infinigen_jax.engine.generation import Run
from infinigen_jax.loading.load import Model
from infinigen_jax.policies import Full, InfiniGen, InfiniGenPaper

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

MARGIN = 1  # untimed tokens of a round
FEWEST_STEPS = 6  # single steps, however long they take
# The full cache on the host. New rows are written there in blocks, as by InfiniGen, not one by one.
STREAMED = Full(window=InfiniGen().window)


class StepTime(NamedTuple):
    """Single step, with the device idle before and after it."""

    seconds: float  # until the result is available
    dispatch: float | None = None  # until Python is free again; None if it cannot be measured
    flush: bool = False  # whether the step wrote the recent window to the host


class System(Protocol):
    """Generation in progress; `drawn` holds the tokens of the first sequence so far."""

    drawn: list[int]

    def warm_up(self, rounds: int, tokens: int) -> None:
        """Run untimed rounds: compile, and settle adaptive choices."""
        for _ in range(rounds):
            self.round(tokens)

    def round(self, tokens: int) -> float:
        """Decode MARGIN + `tokens` tokens of every sequence; return the seconds of the latter."""
        ...

    def step(self) -> StepTime:
        """Decode one token of every sequence as a single step."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return further entries for the result file."""
        ...


def is_ours(name: str) -> bool:
    return name not in THEIRS and name not in LLAMA_CPP


def new_tokens(options: argparse.Namespace) -> int:
    """Return the number of tokens that a system decodes in total."""
    rounds = (options.warmup + options.rounds) * (options.tokens + MARGIN)
    return rounds + max(options.steps, FEWEST_STEPS) + options.trace_steps + 1


def settings(name: str, options: argparse.Namespace, model: Model, context: int) -> dict[str, Any]:
    """Return the arguments of `Engine` for a system of this package; others keep defaults."""
    if name == "full-device":
        return {"policy": Full(), "dense_layers": model.config.num_layers}
    if name == "full-streamed":
        return {"policy": STREAMED}
    if name == "infinigen-paper":
        paper = InfiniGenPaper(alpha=5.0 if model.config.family == "llama" else 4.0)
        return {"policy": paper, "dense_layers": 0, "hot_set": 0.0}
    if name == "infinigen-fixed":
        return {"policy": InfiniGen(budget=min(options.budget_rows / context, 1.0))}
    if name == "infinigen-int4":
        return {"policy": InfiniGen(), "rows": "int4"}
    return {"policy": InfiniGen(**read_policy(name)[1])}


class Ours(System):
    """Run of this package, decoded token by token like `Engine.generate`."""

    def __init__(self, run: Run):
        self.run = run
        self.drawn: list[int] = []
        self._tokens = run.tokens(ignore_eos=True)
        self._advanced, self._dispatch = 0, 0.0
        self._advance = run.advance
        run.advance = self._timed_advance  # type: ignore[method-assign]

    def _timed_advance(self) -> None:
        start = time.perf_counter()
        self._advance()
        self._dispatch = time.perf_counter() - start
        self._advanced += 1

    def round(self, tokens: int) -> float:
        # The engine dispatches one step ahead. Read the step that waited since the last round
        # first, so that exactly `tokens` steps begin and end in the measured time, and the next one
        # ends before another system's turn.
        for _ in range(MARGIN):
            self._next()
        start = time.perf_counter()
        for _ in range(tokens):
            self._next()
        seconds = time.perf_counter() - start
        self.wait()
        return seconds

    def step(self) -> StepTime:
        # The tokens read here are already available; the dispatched step is timed.
        flush = self._advanced % self.run.decoder.policy.window == 0
        start = time.perf_counter()
        self._next()
        self.wait()
        return StepTime(time.perf_counter() - start, self._dispatch, flush)

    def steps(self, count: int) -> None:
        """Decode consecutive steps, as in a generation, and wait for the last one."""
        for _ in range(count):
            self._next()
        self.wait()

    def wait(self) -> None:
        jax.block_until_ready((self.run.drawn, self.run.cache))

    def facts(self) -> dict[str, Any]:
        stats, decoder = self.run.stats(), self.run.decoder
        offloads = bool(decoder.host_layers)
        return {
            "policy": str(decoder.policy),
            "transfer": stats.transfer,
            "selected_fraction": stats.selected_fraction if offloads else None,
            "fetched_fraction": stats.fetched_fraction if offloads else None,
            "hot_set_hit_rate": stats.hot_set_hit_rate if stats.hot_set_bytes else None,
            "host_to_device_bytes_per_token": stats.host_to_device_bytes_per_token,
            "host_cache_bytes": stats.host_cache_bytes,
            "hot_set_bytes": stats.hot_set_bytes,
        }

    def _next(self) -> None:
        token = next(self._tokens)[0]
        assert token is not None
        self.drawn.append(token)
