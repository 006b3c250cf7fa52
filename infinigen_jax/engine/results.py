"""Results of a generation: tokens, texts, log-probabilities, times, and rows selected and moved."""

import dataclasses
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from infinigen_jax.decode.state import Counts
from infinigen_jax.sampling import LogProbs

if TYPE_CHECKING:
    from infinigen_jax.engine.generation import Run


class Choice(NamedTuple):
    """A drawn token's place in the model's distribution, before penalties and temperature.

    Attributes:
        log_prob: natural log-probability of the token.
        top: the likeliest tokens with their log-probabilities, descending.
    """

    log_prob: float
    top: list[tuple[int, float]]


def choices_of(log_probs: LogProbs, alternatives: int) -> list[Choice]:
    """Return the choice of each sequence, with the given number of likeliest tokens."""
    drawn, top, tokens = (np.asarray(array) for array in log_probs)
    pairs = top[:, :alternatives].tolist(), tokens[:, :alternatives].tolist()
    return [
        Choice(log_prob, list(zip(tokens, top, strict=True)))
        for log_prob, top, tokens in zip(drawn.tolist(), *pairs, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Step:
    """Tokens of one decode step.

    Attributes:
        tokens: new token of each prompt; None if it has ended or not begun yet.
        texts: text completed by the new tokens, possibly empty. Empty strings for a model without
            a tokenizer.
        log_probs: choice of each new token, if asked for.
    """

    tokens: list[int | None]
    texts: list[str]
    log_probs: list[Choice | None] | None = None


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of a generation.

    Attributes:
        prompt_tokens, new_tokens: totals over all prompts of the run.
        prompt_tokens_read: prompt tokens processed, excluding cached ones; those of a shared prefix
            count once.
        prefill_seconds: time to the first token, and to read prompts that joined later.
        decode_seconds, decode_tokens_per_second: time and rate of the whole batch. The first decode
            step, which may compile, is excluded unless it is the only one.
        selected_fraction: ratio of selected rows to cached rows, averaged over steps, host layers,
            KV heads and sequences.
        fetched_fraction: ratio of fetched rows to cached rows, averaged likewise. Fetched rows are
            the selected rows missing from the hot set, without the padding of a transfer.
        host_to_device_bytes_per_token: bytes of all rows moved, including padding where whole
            requests move (`Layout.padded_rows`).
        hot_set_hit_rate: share of the selected rows in the hot set; 0 without a hot set.
        host_cache_bytes, device_index_bytes, hot_set_bytes: sizes of the host cache, of the
            policy's state and of the hot sets.
        pool_tokens: maximum number of rows on the host per layer, sequence and KV head; 0 without a
            limit. With a limit, only the rows on the host count as cached.
        pool_bytes: size of the directories of a pool on the device.
        compilations_after_warmup: XLA compilations after the first decode step, except those of the
            first prompt of a length that joins later; 0 is expected.
        policy, schedule, transfer, rows: settings of the run.
    """

    prompt_tokens: int
    prompt_tokens_read: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    decode_tokens_per_second: float
    selected_fraction: float
    fetched_fraction: float
    hot_set_hit_rate: float
    host_to_device_bytes_per_token: float
    host_cache_bytes: int
    device_index_bytes: int
    hot_set_bytes: int
    pool_tokens: int
    pool_bytes: int
    compilations_after_warmup: int
    policy: str
    schedule: str
    transfer: str
    rows: str


@dataclasses.dataclass(frozen=True)
class Generation:
    """Result of `Engine.generate`.

    Attributes:
        tokens, texts: new tokens and text of each prompt.
        stats: statistics of the run.
        log_probs: choice of each new token, per prompt; empty lists unless asked for.
    """

    tokens: list[list[int]]
    texts: list[str]
    stats: Stats
    log_probs: list[list[Choice]] = dataclasses.field(default_factory=list)


SIZES = ("host_cache_bytes", "device_index_bytes", "hot_set_bytes")


@dataclasses.dataclass(frozen=True)
class Moved:
    """Rows that decode steps moved: sums over tokens, which can be added; sizes of one batch."""

    tokens: int = 0
    selected: float = 0.0  # rows over cached rows for each token, see `Stats`; so is `fetched`
    fetched: float = 0.0
    selected_rows: int = 0
    fetched_rows: int = 0
    moved_bytes: int = 0
    host_cache_bytes: int = 0
    device_index_bytes: int = 0
    hot_set_bytes: int = 0

    def __add__(self, other: Self) -> Self:
        pairs = zip(vars(self).items(), vars(other).values(), strict=True)
        return type(self)(**{n: max(x, y) if n in SIZES else x + y for (n, x), y in pairs})

    def per_token(self) -> dict[str, Any]:
        """Return the fields of `Stats` about moved rows."""
        tokens, rows = max(self.tokens, 1), self.selected_rows
        return {
            "selected_fraction": self.selected / tokens,
            "fetched_fraction": self.fetched / tokens,
            "hot_set_hit_rate": 1 - self.fetched_rows / rows if rows else 0.0,
            "host_to_device_bytes_per_token": self.moved_bytes / tokens,
            **{name: getattr(self, name) for name in SIZES},
        }


class Clock:
    """Times of a run, in seconds; each call adds the time since the previous call.

    `first` is the time to the first token; `prefill` adds the prompts admitted later.
    """

    def __init__(self):
        self.prefill = 0.0
        self.first = 0.0
        self._last = time.perf_counter()
        self._steps: list[float] = []  # time until the tokens of each step were read
        self._tokens: list[int] = []  # new tokens per step, excluding those that prefill draws

    def read_prompts(self) -> None:
        self.prefill += self._lap()
        self.first = self.first or self.prefill

    def step(self, tokens: int) -> None:
        """Record a step whose `tokens` new tokens were read."""
        self._steps.append(self._lap())
        self._tokens.append(tokens)

    def step_went_on(self) -> None:
        """Add the time spent waiting for the step after the last recorded one."""
        self._steps[-1] += self._lap()

    @property
    def steps(self) -> int:
        """Number of `step` calls: the tokens of the prompts, and steps or rounds after them."""
        return len(self._steps)

    def decoding(self) -> tuple[float, int]:
        """Return seconds and tokens, without the first decode step unless it is the only one."""
        later = slice(2, None) if len(self._steps) > 2 else slice(1, None)
        return sum(self._steps[later], 0.0), sum(self._tokens[later])

    def _lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def rows_per_step(counts: list[Counts], kept: np.ndarray) -> Counts:
    """Stack the counts of all steps as NumPy arrays [steps, b], 0 where `kept` is false."""

    def stack(field: str) -> Any:
        rows = [np.asarray(getattr(each, field)) for each in counts]
        return np.where(kept, np.stack(rows), 0) if rows else np.zeros(kept.shape, np.int32)

    return Counts(stack("selected"), stack("moved"))


def moved_by(
    run: "Run", rows: Counts, kept: np.ndarray, past: np.ndarray, tokens: int, transfers: int
) -> Moved:
    """Return what a run moved for `tokens` new tokens, in the steps that are `kept`.

    `rows` are those of `rows_per_step`, `past` the tokens before each step. Padded transfers have
    equal sizes; `transfers` is the number of steps times that of sequences.
    """
    decoder, plan, heads = run.decoder, run.plan, run.decoder.config.num_kv_heads
    cached = np.minimum(past, run.slots).astype(np.int64) * decoder.host_layers * heads
    weight = tokens / max(1, int(kept.sum()))
    selected, fetched = (weight * float((of / np.maximum(cached, 1)).sum()) for of in rows)
    padded, moved = decoder.padded_rows(run.slots), int(rows.moved.sum())
    crossed = moved if padded is None else transfers * heads * padded
    size = crossed * decoder.row_format.width * decoder.row_format.storage.itemsize
    sizes = plan.host_cache, plan.index, plan.hot
    return Moved(tokens, selected, fetched, int(rows.selected.sum()), moved, size, *sizes)
