"""Waves of the decode benchmark: which systems fit in memory, and which of them together."""

import argparse
import dataclasses
import time
from typing import Any

import jax

from benchmarks.physics import Memory, memory_of, memory_of_theirs
from benchmarks.presets import is_ours
from benchmarks.systems import new_tokens, settings
from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import Model
from infinigen_jax.machine.memory_limits import (
    available_device_bytes,
    available_host_bytes,
    pinned_pool_limit_bytes,
)


@dataclasses.dataclass(frozen=True)
class Bench:
    """Values that are the same for every context.

    Attributes:
        other: transformers' model with the same weights, if one of its systems is measured.
        bandwidths: bytes per second of the device's memory, and from host to device.
        deadline: time on `time.monotonic` after which no measurement starts.
    """

    options: argparse.Namespace
    model: Model
    other: Any
    bandwidths: tuple[float, float | None]
    deadline: float

    @property
    def late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline


def needs_of(bench: Bench, context: int) -> tuple[dict[str, Memory], dict[str, Any]]:
    """Return the memory of each system that can run, and the reasons why others cannot."""
    options, model = bench.options, bench.model
    total = context + new_tokens(options) + 1
    needs: dict[str, Memory] = {}
    absent: dict[str, Any] = {}
    for name in options.systems:
        if name == "transformers-offloaded" and jax.default_backend() != "gpu":
            reason = "transformers offloads to the host from CUDA only"
            absent[name] = absent_entry("skipped", reason)
            continue
        if is_ours(name):
            try:
                engine = Engine(model, **settings(name, options, model, context))
            except InputError as error:
                absent[name] = absent_entry("refused", str(error))
                continue
            needs[name] = memory_of(engine, options.batch, total)
        else:
            needs[name] = memory_of_theirs(name, model, options.batch, total)
    return needs, absent


def absent_entry(kind: str, reason: str) -> dict[str, Any]:
    """Return the result entry of a system that was not measured."""
    return {"absent": kind, "reason": reason}


def room_of(bench: Bench) -> Memory:
    """Return the memory that systems may use together, excluding weights and prompt."""
    device = jax.devices()[0]
    host = int(0.85 * available_host_bytes())
    if device.platform == "cpu":
        return Memory(host, host)
    pool = pinned_pool_limit_bytes(device)
    free = available_device_bytes(device) or 0
    if bench.other is not None:
        import torch

        free = torch.cuda.mem_get_info()[0]
    return Memory(int(0.8 * free), min(host, pool or host))


def waves_of(needs: dict[str, Memory], room: Memory) -> list[list[str]]:
    """Group systems in their order, as many as fit together, at least one per wave."""
    waves: list[list[str]] = []
    device = host = 0
    for name, need in needs.items():
        device, host = device + need.device, host + need.host
        together = device <= room.device and host <= room.host
        if jax.default_backend() == "cpu":
            together = device + host <= room.host
        if not waves or not together:
            waves.append([])
            device, host = need.device, need.host
        waves[-1].append(name)
    return waves
