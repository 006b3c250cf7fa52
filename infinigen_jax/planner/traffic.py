"""Bytes that a decode step moves, and lower bounds on the times of steps and lossless rounds."""

import dataclasses

from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Weights
from infinigen_jax.engine.draft_length import START, DraftLength
from infinigen_jax.engine.memory_plan import MemoryPlan
from infinigen_jax.machine.memory_limits import tree_bytes
from infinigen_jax.transfer.host_weights import in_host_memory

HIT_RATE = 0.6  # assumed for a hot set of twice a request
ACCEPTED = START  # assumed share of the drafted tokens that are accepted


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one decode step (one token of every sequence) moves, without padding.

    Attributes:
        weights: weights of all layers and of the output projection.
        device_cache: cached rows of dense layers; all rows if nothing is cached on the host.
        attended: rows of the other layers that attention reads.
        link: bytes of these rows that come from the host, in their stored format.
        brought: bytes of the weights that come from the host.
        whole: part of `attended` of layers that attend to all of their rows.
    """

    weights: int
    device_cache: int
    index: int
    attended: int
    link: int
    brought: int = 0
    whole: int = 0

    @property
    def memory(self) -> int:
        """Bytes read from the device's memory."""
        return self.weights + self.device_cache + self.index + self.attended

    def floor_ms(self, memory: float, link: float | None) -> float:
        """Return the least milliseconds of a step at these bandwidths, in bytes per second."""
        copied = self.link + self.brought
        return 1e3 * max(self.memory / memory, copied / link if link else 0.0)


def planned_traffic(
    decoder: Decoder,
    weights: Weights,
    plan: MemoryPlan,
    batch: int,
    context: int,
    capacity: int,
    slots: int,
) -> Traffic:
    """Predict the traffic of a step in which every request is as large as the budget.

    Weights may be arrays or their shapes. Layers with a sliding window are read whole.
    """
    config, layers = decoder.config, weights.params["layers"]
    embedding = weights.params["embedding"]
    head = embedding["tokens" if config.tie_embeddings else "head"]
    streamed = decoder.host_layers - len(decoder.selecting)
    on_host = min(context, slots)
    requested = sum(decoder.request_sizes(on_host))
    stored = decoder.row_format.width * decoder.row_format.storage.itemsize
    rows = batch * config.num_kv_heads * stored
    chosen, whole = requested * rows, streamed * on_host * rows
    padded = decoder.padded_rows(slots)
    link = whole + int(chosen * (1 - HIT_RATE if decoder.hot_set else 1))
    return Traffic(
        weights=tree_bytes((layers, head, weights.policy)),
        device_cache=plan.dense_cache * context // capacity,
        index=plan.index,
        attended=chosen + whole,
        whole=whole,
        link=link if padded is None else padded * rows,
        brought=tree_bytes(list(map(in_host_memory, layers))) if decoder.weights_on_host else 0,
    )


@dataclasses.dataclass(frozen=True)
class RoundsForecast:
    """Lower bounds on the seconds per token of a sequence, without the time of computing.

    `drafted` tokens precede a verification; 0 if drafts do not pay. `full` is the time of decoding
    with the full cache, from where it is.
    """

    drafted: int
    seconds: float
    full: float


def forecast_rounds(draft: float, verification: float, most: int) -> RoundsForecast:
    """Return the best rounds for times in seconds, with a share ACCEPTED of drafts accepted."""
    length = DraftLength(most)
    length.time_draft(1, draft)
    for size in length.sizes:
        length.time_verification(size, verification)
    drafted = length.best(most)
    return RoundsForecast(drafted, 1 / length.rate(drafted), verification)
