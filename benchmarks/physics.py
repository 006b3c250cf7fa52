"""Bytes that a decode step cannot avoid to move, and the time that this takes at best."""

import dataclasses

import jax

from benchmarks.systems import Ours
from infinigen_jax.checkpoint import Model


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one decode step (a token of every sequence) reads; padding is left out.

    Attributes:
        weights: of all layers and the output projection.
        device_cache: cached rows of dense layers; all of them in a system without a host cache.
        index: the policy's state.
        host_rows: rows that attention wants from the host cache, which cross the bus on a GPU.
    """

    weights: int
    device_cache: int
    index: int
    host_rows: int

    def floor_ms(self, memory: float, link: float | None) -> float:
        """Least milliseconds of a step at these bandwidths, bytes per second.

        Args:
            link: from host to device, which works while memory is read; None without one.
        """
        device = self.weights + self.device_cache + self.index
        if link is None:
            return 1e3 * (device + self.host_rows) / memory
        return 1e3 * max((device + self.host_rows) / memory, self.host_rows / link)


def resident_traffic(model: Model, batch: int, context: int) -> Traffic:
    """Of a system that keeps the whole cache beside the weights."""
    cache = _rows(model, batch) * context * model.config.num_layers
    return Traffic(_weights(model), cache, 0, 0)


def offloaded_traffic(model: Model, system: Ours, context: int, fraction: float) -> Traffic:
    """Of this package's own.

    Args:
        context: tokens of a sequence, in the middle of the measurement.
        fraction: of the cached rows, that were fetched.
    """
    run = system.run
    row = _rows(model, len(run.prompt_lengths))
    decoder = run.decoder
    return Traffic(
        weights=_weights(model),
        device_cache=row * context * decoder.dense_layers,
        index=run.plan.index * context // run.capacity,
        host_rows=int(row * context * decoder.host_layers * fraction),
    )


def _weights(model: Model) -> int:
    head = model.params["embedding"]["tokens" if model.config.tie_embeddings else "head"]
    leaves = jax.tree.leaves((model.params["layers"], head))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _rows(model: Model, batch: int) -> int:
    """Bytes that a token of each sequence has in one layer."""
    config = model.config
    return batch * config.num_kv_heads * 2 * config.head_dim * model.dtype.itemsize
