"""What a measurement was made on: hardware, versions, commit, and how fast memory is read."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")


def describe() -> dict[str, Any]:
    """Hardware, versions, date and git commit, for a JSON file."""
    device = jax.devices()[0]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "device": f"{device.platform}: {device.device_kind}",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
    }


def memory_read_bandwidth(size: int = 1 << 29) -> float:
    """Bytes per second at which the device reads its memory, all cores together.

    The best of several ways to sum `size` bytes, since a floor calls for the highest rate.
    """
    side = 4096
    x = jnp.ones((size // 4 // side, side), jnp.float32)
    v = jnp.ones(side, jnp.float32)
    sums, product = jax.jit(jnp.sum), jax.jit(jnp.matmul)
    ways: list[Callable[[], Any]] = [
        lambda: sums(x).block_until_ready(),
        lambda: product(x, v).block_until_ready(),
    ]
    if jax.default_backend() == "cpu" and _version("torch"):
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        tensor = torch.from_dlpack(x)
        ways.append(lambda: tensor.sum().item())
    return size / min(_best(way) for way in ways)


def host_to_device_bandwidth(size: int = 1 << 28) -> float | None:
    """Bytes per second of a copy from pinned host memory; None where there is no such bus."""
    if jax.default_backend() == "cpu":
        return None
    device = jax.devices()[0]
    here = jax.sharding.SingleDeviceSharding(device)
    x = jax.device_put(jnp.ones(size, jnp.uint8), here.with_memory_kind("pinned_host"))
    return size / _best(lambda: jax.device_put(x, here).block_until_ready())


def _best(way: Callable[[], Any], repeats: int = 5) -> float:
    way()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        way()
        times.append(time.perf_counter() - start)
    return min(times)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit; "+" behind it where tracked files were changed since."""
    try:
        git = ["git", "-C", str(ROOT)]
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")
