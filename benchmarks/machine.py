"""The measuring machine: hardware, versions, commit and memory bandwidth; and files of results."""

import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from infinigen_jax.evaluation.report import version_of
from infinigen_jax.files.atomic import whole_file
from infinigen_jax.planner import bandwidths

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")


def describe() -> dict[str, Any]:
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


def memory_read_bandwidth() -> float:
    """Measure like `planner.bandwidths`; on the CPU also with PyTorch, and return the best rate."""
    fastest = bandwidths.memory_read_bandwidth()
    if jax.default_backend() != "cpu" or not version_of("torch"):
        return fastest
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tensor = torch.ones(1 << 27)
    return max(fastest, tensor.nbytes / bandwidths.best_seconds(lambda: tensor.sum().item()))


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _commit() -> str | None:
    """Return the commit, with "+" if tracked files were changed since."""
    command = "git describe --always --abbrev=40 --exclude=* --dirty=+".split()
    try:
        return subprocess.check_output(command, cwd=RESULTS, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def result_path(name: str, model: str | Path | None = None) -> Path:
    """Return the file of a result on this device; a given model's name is a part of it."""
    parts = [name, *([] if model is None else [Path(model).name]), "gpu" if has_gpu() else "cpu"]
    return RESULTS / f"{'-'.join(parts)}.json"


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write((json.dumps(result, indent=1) + "\n").encode())


def note(text: str) -> None:
    """Print progress to stderr; stdout is for the result."""
    print(text, file=sys.stderr, flush=True)
