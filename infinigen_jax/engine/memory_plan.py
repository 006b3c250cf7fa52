"""Memory of a generation, estimated before anything is allocated."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from infinigen_jax.decode.layer import Decoder
from infinigen_jax.engine.remedies import Remedies
from infinigen_jax.errors import MemoryShortageError
from infinigen_jax.machine.memory_limits import (
    available_device_bytes,
    available_host_bytes,
    pinned_bytes_in_use,
    pinned_pool_limit_bytes,
    tree_bytes,
    unused_pinned_bytes,
    widen_pool_to,
)
from infinigen_jax.messages import format_bytes


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a generation, excluding the model's weights.

    Attributes:
        host_cache: rows of the host layers.
        dense_cache: rows of the device layers, including those of sliding windows.
        index: state of the policy.
        resident: sinks, recent windows and sums of values.
        hot: hot sets with their directories.
        pool: directories of a pool.
        workspace: temporaries of prefill, of a decode step, or of the larger of the two, including
            weights on their way from host memory.
        prefixes: a server's copies of rows of prompt prefixes, in host memory that is not pinned.
    """

    host_cache: int
    dense_cache: int
    index: int
    resident: int
    hot: int
    pool: int
    workspace: int
    prefixes: int = 0

    @property
    def total(self) -> int:
        """Bytes of host and device memory."""
        return self.host_cache + self.prefixes + self.device

    @property
    def device(self) -> int:
        """Bytes of device memory."""
        kept = self.dense_cache + self.index + self.resident + self.hot + self.pool
        return kept + self.workspace

    def __add__(self, other: "MemoryPlan") -> "MemoryPlan":
        names = (field.name for field in dataclasses.fields(self))
        return MemoryPlan(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def at_work(self, workspace: int) -> "MemoryPlan":
        """Return the plan with another workspace."""
        return dataclasses.replace(self, workspace=workspace)


def plan_cache(decoder: Decoder, batch: int, capacity: int, slots: int | None = None) -> MemoryPlan:
    """Estimate the memory of the caches of `batch` sequences, without a workspace.

    `slots` is the host's capacity if it is limited.
    """
    slots = capacity if slots is None else slots
    config, policy, item = decoder.config, decoder.policy, decoder.dtype.itemsize
    row = batch * config.num_kv_heads * 2 * config.head_dim * item
    stored_row = batch * config.num_kv_heads * decoder.row_format.width
    stored_row *= decoder.row_format.storage.itemsize
    selecting = len(decoder.selecting)
    index = selecting * _bytes(lambda: policy.init(config, batch, slots)) if selecting else 0
    hot = selecting * _bytes(lambda: decoder.empty_hot_set(batch, slots)) if selecting else 0
    pool = 0
    if decoder.pool is not None:
        entries = batch * config.num_kv_heads * slots
        pool = decoder.host_layers * 4 * entries
        pool += selecting * entries * decoder.pool.use_bytes
    blocks = decoder.slots.blocks(slots) if policy.has_tail else 0
    sums = 4 * batch * config.num_kv_heads * blocks * config.head_dim
    on_device = set(range(config.num_layers)) - set(decoder.on_host)
    tokens = sum(decoder.ring_size(layer, capacity) or capacity for layer in on_device)
    return MemoryPlan(
        host_cache=decoder.host_layers * slots * stored_row,
        dense_cache=row * tokens,
        index=index,
        resident=decoder.host_layers * decoder.slots.size * row + selecting * sums,
        hot=hot,
        pool=pool,
        workspace=0,
    )


def _bytes(make: Callable[[], Any]) -> int:
    """Return the bytes that `make` would allocate."""
    return tree_bytes(jax.eval_shape(make))


class Shortage(NamedTuple):
    """Description of a shortage, and the memory that is too small: host, pinned or device."""

    what: str
    memory: str


def shortage(plan: MemoryPlan, device: Any, share: float = 1.0) -> Shortage | None:
    """Return the shortage if a plan exceeds a share of the free memory; None if it fits."""
    host = available_host_bytes() + unused_pinned_bytes(device)
    needed = plan.host_cache + plan.prefixes + (plan.device if device.platform == "cpu" else 0)
    if needed > share * host:
        cache = f"(KV cache {format_bytes(plan.host_cache)})"
        text = f"{format_bytes(needed)} of host memory {cache}, and {format_bytes(host)} are"
        return Shortage(f"{text} available", "host")
    pool = pinned_pool_limit_bytes(device)
    if pool is not None and plan.host_cache + (used := pinned_bytes_in_use(device)) > pool:
        text = f"{format_bytes(plan.host_cache)} of pinned memory for the KV cache, and JAX may"
        rest = f", of which {format_bytes(used)} are in use" if used else ""
        return Shortage(f"{text} take {format_bytes(pool)}{rest}", "pinned")
    room = None if device.platform == "cpu" else available_device_bytes(device)
    if room is not None and plan.device > share * room:
        text = f"{format_bytes(plan.device)} of device memory, and {format_bytes(room)} are free"
        return Shortage(text, "device")
    return None


def check_memory(plan: MemoryPlan, device: Any, remedies: Remedies) -> None:
    """Raise MemoryShortageError, with the sizes and the remedy, if a plan does not fit."""
    lack = shortage(plan, device)
    if lack is None:
        return
    if lack.memory == "pinned":
        remedy = widen_pool_to(plan.host_cache + pinned_bytes_in_use(device))
    elif lack.memory == "host":
        remedy = remedies.for_host(plan, unified=device.platform == "cpu")
    else:
        remedy = remedies.for_device(plan)
    raise MemoryShortageError(f"this generation needs {lack.what}: {remedy}")
