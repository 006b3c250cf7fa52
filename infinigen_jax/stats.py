"""What a generation took: times, and rows that were selected and moved."""

import dataclasses
from typing import Any

import numpy as np

from infinigen_jax.carry import Counts
from infinigen_jax.decode import Decoder


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
