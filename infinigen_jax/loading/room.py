"""Room for a model's weights: whether they fit, and how many layers to read at a time."""

from pathlib import Path

import jax

from infinigen_jax.errors import MemoryShortageError
from infinigen_jax.machine.memory_limits import (
    available_device_bytes,
    available_host_bytes,
    pinned_pool_limit_bytes,
    tree_bytes,
    widen_pool_to,
)
from infinigen_jax.messages import format_bytes
from infinigen_jax.models import Blueprint, blueprint
from infinigen_jax.models.small_weights import small_dtype

READERS = 4  # layers read, and dequantised, at a time


def check_room(folder: Path, architecture: Blueprint, weights: str) -> int | None:
    """Refuse weights that do not fit before reading any; return the bytes left, None if unknown."""
    device, layers_on_device = jax.devices()[0], architecture.config.num_layers
    layer = tree_bytes(architecture.layer_shapes)

    def check(memory: str, needed: int, available: int | None, remedy: str) -> None:
        if available is not None and needed > available:
            raise MemoryShortageError(
                f"{folder}: the weights need {format_bytes(needed)} of {memory}, and "
                f"{format_bytes(available)} are available; {remedy}"
            )

    smaller = "use `weight_dtype` int8 or a smaller model"
    if weights == "host" and device.platform != "cpu":
        on_host = layer * layers_on_device
        check("host memory", on_host, available_host_bytes(), smaller)
        pool = pinned_pool_limit_bytes(device)
        check("pinned memory", on_host, pool, widen_pool_to(on_host))
        layers_on_device = min(2, layers_on_device)  # layers on the device at a time
    embedding = tree_bytes(architecture.embedding_shapes)
    needed = embedding + layer * layers_on_device
    if small_dtype(architecture.layer_shapes) is not None:  # weights are read before they are small
        whole = blueprint(architecture.config, architecture.dtype)
        largest = max(map(tree_bytes, whole.embedding_shapes.values()))
        needed = max(needed + tree_bytes(whole.layer_shapes), embedding + largest)
    available = available_device_bytes(device)
    check("memory", needed, available, f"{smaller}, or `weights` host")
    return None if available is None else available - needed


def readers(architecture: Blueprint, room: int | None) -> int:
    """Return how many layers to read at a time; each takes twice its size for a while."""
    layer = 2 * tree_bytes(architecture.layer_shapes)
    return READERS if room is None else max(1, min(READERS, room // layer))
