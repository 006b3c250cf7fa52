"""Description of the measuring machine: hardware, versions, commit, and memory bandwidth."""

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

from benchmarks.files import RESULTS
from infinigen_jax.evaluation.report import version_of
from infinigen_jax.planner import bandwidths

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")


def describe() -> dict[str, Any]:
    """Return hardware, versions, date and git commit for a JSON file."""
    device = jax.devices()[0]
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "device": f"{device.platform}: {device.device_kind}",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
    }


def has_gpu() -> bool:
    """Return whether JAX will use an NVIDIA GPU, without starting JAX's backend."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    allowed = not platforms or "cuda" in platforms or "gpu" in platforms
    return allowed and any(Path("/dev").glob("nvidia[0-9]*"))


def device_name() -> str:
    """Return "gpu" or "cpu", for the name of a result file."""
    return "gpu" if has_gpu() else "cpu"


def memory_read_bandwidth(size: int | None = None) -> float:
    """Measure like `planner.bandwidths`; on the CPU also with PyTorch, and return the best rate."""
    size = size or (1 << 29 if jax.default_backend() == "cpu" else 1 << 31)
    fastest = bandwidths.memory_read_bandwidth(size)
    if jax.default_backend() != "cpu" or not version_of("torch"):
        return fastest
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tensor = torch.ones(size // 4)
    return max(fastest, size / bandwidths.best_seconds(lambda: tensor.sum().item()))


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _commit() -> str | None:
    """Return the commit, with "+" if tracked files were changed since."""
    try:
        git = ["git", "-C", str(ROOT)]
        commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def result_path(name: str, model: str | Path | None = None) -> Path:
    """Return the file of a result on this device; a given model's name is a part of it."""
    parts = [name, *([] if model is None else [Path(model).name]), device_name()]
    return RESULTS / f"{'-'.join(parts)}.json"
