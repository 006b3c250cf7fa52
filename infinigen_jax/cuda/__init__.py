"""CUDA kernels of this package: built at run time, called from inside XLA's programs.

    gather.cu           rows from pinned host memory, beside XLA's work (transfer/cuda.py)
    top.cu, select.cu   the choice of rows to fetch, one launch instead of many
    plan.cu             the hot set's bookkeeping, one launch instead of many
    score.cu            scores by a quantised index, which is read once for all query heads

Nothing here needs more than JAX's CUDA wheels: NVRTC compiles the sources (`nvrtc`), the driver's
interface launches them (`driver`, `launch`), XLA calls handlers written in Python (`ffi`).
INFINIGEN_JAX_KERNELS=0 in the environment leaves all of it to XLA.
"""

import functools
import os
from importlib import resources

import jax

from infinigen_jax.cuda.driver import CudaError, Driver
from infinigen_jax.cuda.launch import Launcher
from infinigen_jax.cuda.nvrtc import CompileError, kernels

SWITCH = "INFINIGEN_JAX_KERNELS"
SOURCES = ("gather.cu", "top.cu", "select.cu", "plan.cu", "score.cu")


def source() -> str:
    """All kernels, as one translation unit."""
    folder = resources.files("infinigen_jax.cuda")
    return "\n".join(folder.joinpath(name).read_text() for name in SOURCES)


@functools.cache
def unavailable() -> str | None:
    """Why the kernels cannot be used in this process, in a line; None where they can.

    The first call compiles them, or finds them in the cache, loads them into every GPU that JAX
    uses, and registers the FFI targets.
    """
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if jax.default_backend() != "gpu":
        return "JAX sees no NVIDIA GPU"
    try:
        launcher = Launcher(Driver(), lambda architecture: kernels(source(), architecture))
        for device in jax.local_devices():
            launcher.prepare(device.local_hardware_id)
    except (OSError, AttributeError, CudaError, CompileError) as error:
        return " ".join(str(error).split())
    launcher.register()
    return None


def in_use() -> bool:
    """Whether programs that are traced now are to call the kernels."""
    return jax.default_backend() == "gpu" and unavailable() is None


__all__ = ["in_use", "source", "unavailable"]
