"""The systems of this package that are compared: a generation in progress of each.

Each is started with prompts and then asked, round by round, for a number of further tokens; it
takes the time itself, because what belongs to a round differs. Contexts grow alike in all.
"""

import argparse
import time
from typing import Any, NamedTuple, Protocol

import jax

from infinigen_jax.cli.options import read_policy
from infinigen_jax.engine.generation import Run
from infinigen_jax.loading.load import Model
from infinigen_jax.policies import Full, InfiniGen, InfiniGenPaper

MARGIN = 1  # tokens of a round that are drawn and not timed


class StepTime(NamedTuple):
    """One step by itself, the device idle before it and awaited behind it.

    Attributes:
        seconds: until its result is there.
        dispatch: of them, until Python had its hands free; None where that is not to be told.
        flush: the recent window was written to the host in this step.
    """

    seconds: float
    dispatch: float | None = None
    flush: bool = False


class System(Protocol):
    """A generation in progress; `drawn` are its tokens of the first sequence so far."""

    drawn: list[int]

    def warm_up(self, rounds: int, tokens: int) -> None:
        """Rounds that do not count: compile, and settle what is to be settled."""
        ...

    def round(self, tokens: int) -> float:
        """Decode MARGIN + `tokens` tokens of every sequence; seconds for the latter."""
        ...

    def step(self) -> StepTime:
        """Decode one token of every sequence, by itself."""
        ...

    def facts(self) -> dict[str, Any]:
        """What else it has to tell, for the result file."""
        ...


def settings(name: str, options: argparse.Namespace, model: Model, context: int) -> dict[str, Any]:
    """Arguments for `Engine` of one of our systems; what is not given is as the engine has it."""
    given = {"dense_layers": options.dense_layers, "hot_set": options.hot_set}
    chosen = {key: value for key, value in given.items() if value is not None}
    chosen["transfer"] = options.transfer
    if name.endswith("-layerwise"):
        chosen["schedule"] = "layerwise"
    for rows in ("int8", "int4"):
        if rows in name:
            chosen["rows"] = rows
    if name == "full-device":
        chosen |= {"policy": Full(), "dense_layers": model.config.num_layers}
    elif name == "infinigen-paper":
        paper = InfiniGenPaper(alpha=5.0 if model.config.family == "llama" else 4.0)
        chosen |= {"policy": paper, "dense_layers": 0, "hot_set": 0.0}
    elif "streamed" in name:
        chosen |= {"policy": Full()}
    else:
        budget = options.budget_rows / context if name == "infinigen-fixed" else options.budget
        given: dict[str, Any] = {"alpha": options.alpha}
        given["budget"] = min(budget, 1.0) if budget else None
        given = {name: value for name, value in given.items() if value is not None}
        own = read_policy(name)[1] if ":" in name else {}
        chosen |= {"policy": InfiniGen(**(given | own))}
    return chosen


class Ours:
    """Tokens of a run one by one, as `Engine.generate` takes them."""

    def __init__(self, run: Run):
        self.run = run
        self.drawn: list[int] = []
        self._tokens = self.run.tokens(ignore_eos=True)
        self._advanced = 0
        self._dispatch = 0.0
        self._advance = self.run.advance
        self.run.advance = self._timed_advance  # type: ignore[method-assign]

    def _timed_advance(self) -> None:
        start = time.perf_counter()
        self._advance()
        self._dispatch = time.perf_counter() - start
        self._advanced += 1

    def warm_up(self, rounds: int, tokens: int) -> None:
        for _ in range(rounds):
            self.round(tokens)

    def round(self, tokens: int) -> float:
        # The engine dispatches a step ahead. The step that waited since the last round is read
        # first, so that exactly `tokens` steps begin and end inside the measured time, and the one
        # behind them ends before another system's turn.
        for _ in range(MARGIN):
            self._next()
        start = time.perf_counter()
        for _ in range(tokens):
            self._next()
        seconds = time.perf_counter() - start
        self.wait()
        return seconds

    def step(self) -> StepTime:
        # The tokens read here are there already: what is timed is the step that is dispatched.
        flush = self._advanced % self.run.decoder.policy.window == 0
        start = time.perf_counter()
        self._next()
        self.wait()
        return StepTime(time.perf_counter() - start, self._dispatch, flush)

    def steps(self, number: int) -> None:
        """Steps in a row, as in a generation, and the end of the last one."""
        for _ in range(number):
            self._next()
        self.wait()

    def wait(self) -> None:
        jax.block_until_ready((self.run.drawn, self.run.cache))

    def facts(self) -> dict[str, Any]:
        stats, decoder = self.run.stats(), self.run.decoder
        offloads, hot = bool(decoder.host_layers), bool(stats.hot_set_bytes)
        return {
            "policy": str(decoder.policy),
            "transfer": stats.transfer,
            "selected_fraction": stats.selected_fraction if offloads else None,
            "fetched_fraction": stats.fetched_fraction if offloads else None,
            "hot_set_hit_rate": stats.hot_set_hit_rate if hot else None,
            "host_to_device_bytes_per_token": stats.host_to_device_bytes_per_token,
            "host_cache_bytes": stats.host_cache_bytes,
            "hot_set_bytes": stats.hot_set_bytes,
        }

    def _next(self) -> None:
        token = next(self._tokens)[0]
        assert token is not None
        self.drawn.append(token)
