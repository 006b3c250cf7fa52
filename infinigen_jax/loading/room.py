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
from infinigen_jax.models.small_weights import read_dtype, small_dtype
from infinigen_jax.numeric import listed
from infinigen_jax.settings.engine import WEIGHT_DTYPES
from infinigen_jax.transfer.host_weights import in_host_memory

READERS = 4  # layers read, and dequantised, at a time


def check_room(folder: Path, architecture: Blueprint, weights: str) -> int | None:
    """Refuse weights that do not fit before reading any; return the bytes left, None if unknown."""
    device = jax.devices()[0]
    layers = [architecture.of(i).layer_shapes for i in range(architecture.config.num_layers)]
    form = small_dtype(architecture.layer_shapes)
    place = WEIGHT_DTYPES.index(form or "bfloat16")
    smaller = [f"`weight_dtype` {fewer}" for fewer in WEIGHT_DTYPES[place + 1 :]]
    smaller.append("a smaller model")

    def check(memory: str, needed: int, available: int | None, remedy: str = "") -> None:
        if available is not None and needed > available:
            raise MemoryShortageError(
                f"{folder}: the weights need {format_bytes(needed)} of {memory}, and "
                f"{format_bytes(available)} are available; {remedy or f'use {listed(smaller)}'}"
            )

    embedding = tree_bytes(architecture.embedding_shapes)
    needed = embedding + tree_bytes(layers)
    if weights == "host" and device.platform != "cpu":
        each = [tree_bytes(in_host_memory(layer)) for layer in layers]
        moved = sum(each)
        check("host memory", moved, available_host_bytes())
        check("pinned memory", moved, pinned_pool_limit_bytes(device), widen_pool_to(moved))
        needed -= max(0, moved - 2 * max(each))  # two layers' are on the device at a time
    elif device.platform != "cpu":
        smaller.append("`weights` host")
    if form is not None:  # weights are read before they are small
        whole = blueprint(architecture.config, read_dtype(form, architecture.dtype))
        largest = max(map(tree_bytes, whole.embedding_shapes.values()))
        needed = max(needed + _largest_layer(whole), embedding + largest)
    available = available_device_bytes(device)
    check("memory", needed, available)
    return None if available is None else available - needed


def readers(architecture: Blueprint, room: int | None) -> int:
    """Return how many layers to read at a time; each takes twice its size for a while."""
    layer = 2 * _largest_layer(architecture)
    return READERS if room is None else max(1, min(READERS, room // layer))


def _largest_layer(architecture: Blueprint) -> int:
    """Return the bytes of a model's largest layer."""
    config = architecture.config
    kinds = {config.of(layer): layer for layer in range(config.num_layers)}
    return max(tree_bytes(architecture.of(layer).layer_shapes) for layer in kinds.values())
