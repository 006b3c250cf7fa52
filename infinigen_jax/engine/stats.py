"""What a generation took: times, and rows that were selected and moved."""

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Counts

if TYPE_CHECKING:
    from infinigen_jax.engine.generation import Run


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a generation took.

    Attributes:
        prompt_tokens, new_tokens: totals over the batch.
        prompt_tokens_read: of the former those that were computed, a shared prefix's once.
        prefill_seconds: from the call to the first token.
        decode_seconds, decode_tokens_per_second: whole batch, without the first decode step, which
            may compile (unless it is the only one).
        selected_fraction: rows selected over rows cached, mean over steps, host layers, KV heads
            and sequences.
        fetched_fraction: likewise of the rows that had to be fetched: those selected that the hot
            set did not have. Padding that a transfer moves beside them is not counted here...
        host_to_device_bytes_per_token: ...but it is here: all bytes of rows that were moved.
        hot_set_hit_rate: share of the rows selected that the hot set had; 0 without one.
        host_cache_bytes, device_index_bytes, hot_set_bytes: size of the host cache, of the policy's
            state and of the hot sets.
        pool_tokens: most rows that the host may keep of a layer, sequence and KV head; 0 if there
            is no limit. Those that it keeps are then what counts as cached.
        pool_bytes: size of the directories on the device that a limit takes.
        compilations_after_warmup: XLA compilations behind the first decode step; 0 is expected.
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


class Clock:
    """Times of a run, in seconds; what passed since the last call belongs to the next one.

    Attributes:
        prefill: until the first tokens, and of prompts that were admitted later.
    """

    def __init__(self):
        self.prefill = 0.0
        self._last = time.perf_counter()
        self._steps: list[float] = []  # until the tokens of each step were read
        self._made: list[int] = []  # tokens that a step made; those behind a prompt do not count

    def read_prompts(self) -> None:
        self.prefill += self._lap()

    def step(self, made: int) -> None:
        """The tokens of a step were read."""
        self._steps.append(self._lap())
        self._made.append(made)

    def step_went_on(self) -> None:
        """The next step was under way, and has been waited for."""
        self._steps[-1] += self._lap()

    @property
    def decode_steps(self) -> int:
        return len(self._steps[1:])

    def decoding(self) -> tuple[float, int]:
        """Seconds and tokens, without the first decode step unless it is the only one."""
        later = slice(2, None) if len(self._steps) > 2 else slice(1, None)
        return sum(self._steps[later], 0.0), sum(self._made[later])

    def _lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        return elapsed


def stats_of(run: "Run") -> Stats:
    """What a run took, up to now."""
    decoder, plan, clock = run.decoder, run.plan, run.clock
    steps_of = np.array([max(0, len(tokens) - 1) for tokens in run.new_tokens])  # decode steps
    seconds, timed = clock.decoding()
    kept, cached = run.owners.history(steps_of)
    rows = rows_per_step(run.counts, kept)
    cached = np.minimum(cached, run.slots)
    selected, fetched = (fraction(decoder, of, kept, cached) for of in rows)
    moved = bytes_moved(decoder, rows, run.slots, run.owners.rows, clock.decode_steps)
    return Stats(
        prompt_tokens=int(run.prompt_lengths.sum()),
        prompt_tokens_read=run.tokens_read,
        new_tokens=sum(map(len, run.new_tokens)),
        prefill_seconds=clock.prefill,
        decode_seconds=seconds,
        decode_tokens_per_second=timed / seconds if seconds else 0.0,
        selected_fraction=selected,
        fetched_fraction=fetched,
        hot_set_hit_rate=1 - float(rows.moved.sum()) / max(1, int(rows.selected.sum())),
        host_to_device_bytes_per_token=moved / max(1, int(steps_of.sum())),
        host_cache_bytes=plan.host_cache,
        device_index_bytes=plan.index,
        hot_set_bytes=plan.hot,
        pool_tokens=0 if decoder.pool is None else run.slots,
        pool_bytes=plan.pool,
        compilations_after_warmup=run.late_compilations,
        policy=decoder.policy.name,
        schedule=run.runtime.settings.schedule,
        transfer=decoder.transfer.name,
        rows=decoder.row_format.name,
    )


def rows_per_step(counts: list[Counts], kept: np.ndarray) -> Counts:
    """Counts of all steps as numpy [steps, b], 0 where no token came of them that was kept."""

    def stack(field: str) -> Any:
        rows = [np.asarray(getattr(each, field)) for each in counts]
        return np.where(kept, np.stack(rows), 0) if rows else np.zeros(kept.shape, np.int32)

    return Counts(stack("selected"), stack("moved"))


def bytes_moved(decoder: Decoder, rows: Counts, slots: int, batch: int, steps: int) -> int:
    """Bytes of rows that were moved to the device in so many steps, padding included.

    Args:
        slots: of the host's cache.
        batch: sequences that are stepped together.
    """
    width = decoder.row_format.width * decoder.row_format.storage.itemsize
    requested = decoder.padded_rows(slots)
    if requested is None:
        return int(rows.moved.sum()) * width
    return steps * batch * decoder.config.num_kv_heads * requested * width


def fraction(decoder: Decoder, counts: Any, kept: np.ndarray, cached: np.ndarray) -> float:
    """Of the rows that the host had: mean over the steps that made a token that was kept.

    Args:
        counts: [steps, b] rows, of all host layers and KV heads.
        kept, cached: [steps, b] which steps those were, and tokens cached then.
    """
    if not decoder.host_layers or not kept.any():
        return 0.0
    there = cached[kept] * decoder.host_layers * decoder.config.num_kv_heads
    return float((counts[kept] / there).mean())
