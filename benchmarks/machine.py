"""What a measurement is made on: hardware, versions, commit, and how fast memory is read."""

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

from infinigen_jax.memory_limits import PINNED_POOL_VARIABLE, available_host_bytes

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


def has_gpu() -> bool:
    """Whether JAX will find an NVIDIA GPU, told without starting JAX's backend."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    wanted = not platforms or "cuda" in platforms or "gpu" in platforms
    return wanted and any(Path("/dev").glob("nvidia[0-9]*"))


def device_name() -> str:
    """ "gpu" or "cpu", for the name of a result file."""
    return "gpu" if has_gpu() else "cpu"


def gpu_environment(shares: bool) -> dict[str, str]:
    """Variables for a process that measures on a GPU, where the user has not set them.

    Args:
        shares: PyTorch uses the GPU too, so JAX must not take most of its memory beforehand.
    """
    if not has_gpu():
        return {}
    pool = max(1, int(0.85 * available_host_bytes()) >> 30)
    wanted = {PINNED_POOL_VARIABLE: str(pool)}
    wanted |= (
        {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        if shares
        else {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    )
    return {name: value for name, value in wanted.items() if name not in os.environ}


def memory_read_bandwidth(size: int | None = None) -> float:
    """Bytes per second at which the device reads its memory, all cores together.

    The best of several ways to sum `size` bytes, since a floor calls for the highest rate; by
    default 0.5 GB on the CPU and 2 GB on a GPU, which would read less in no time.
    """
    size = size or (1 << 29 if jax.default_backend() == "cpu" else 1 << 31)
    side = 4096
    x = jax.random.uniform(jax.random.key(0), (size // 4 // side, side), jnp.float32)
    v = jnp.ones(side, jnp.float32)
    sums, product = jax.jit(jnp.sum), jax.jit(jnp.matmul)
    ways: list[Callable[[], Any]] = [lambda: sums(x), lambda: product(x, v)]
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
    x = jax.random.bits(jax.random.key(0), (size,), jnp.uint8)
    x = jax.device_put(x, here.with_memory_kind("pinned_host"))
    return size / _best(lambda: jax.device_put(x, here))


def _best(way: Callable[[], Any], repeats: int = 5) -> float:
    """Least seconds of a call; on a GPU several in a row, which hide their dispatch."""
    calls = 1 if jax.default_backend() == "cpu" else 8
    jax.block_until_ready(way())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        results = [way() for _ in range(calls)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / calls)
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
