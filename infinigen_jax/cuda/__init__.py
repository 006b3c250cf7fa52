"""CUDA kernels of this package: built at run time, called from inside XLA's programs.

    gather.cu           rows from pinned host memory, beside XLA's work (transfer/cuda.py)
    top.cu, select.cu   the choice of rows to fetch, one launch instead of many
    plan.cu             the hot set's bookkeeping, one launch instead of many
    score.cu            scores by a quantised index, which is read once for all query heads

Nothing here needs more than JAX's CUDA wheels: NVRTC compiles the sources (`nvrtc`), the driver's
interface launches them (`driver`, `launch`), XLA calls handlers written in Python (`ffi`). Before
their first use on a machine they are checked (`check`, `first_use`). INFINIGEN_JAX_KERNELS in the
environment: `0` leaves all of it to XLA, `unchecked` uses the kernels without the check.
"""

import functools
import os
from importlib import resources

import jax

from infinigen_jax.cuda import first_use
from infinigen_jax.cuda.driver import CudaError, Driver
from infinigen_jax.cuda.launch import Launcher
from infinigen_jax.cuda.nvrtc import CompileError, kernels

SOURCES = ("gather.cu", "top.cu", "select.cu", "plan.cu", "score.cu")


def source() -> str:
    """All kernels, as one translation unit."""
    folder = resources.files("infinigen_jax.cuda")
    return "\n".join(folder.joinpath(name).read_text() for name in SOURCES)


@functools.cache
def load() -> str | None:
    """Make the kernels ready for this process; why that cannot be done, in a line, or None.

    The first call compiles them, or finds them in the cache, loads them into every GPU that JAX
    uses, and registers the FFI targets.
    """
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


@functools.cache
def unavailable() -> str | None:
    """Why the kernels are not to be used in this process, in a line; None where they are.

    The first call loads them, and has them checked if this machine has not done so before.
    """
    switch = os.environ.get(first_use.SWITCH)
    if switch == first_use.OFF:
        return f"{first_use.SWITCH} is {switch}"
    if (reason := load()) or switch == first_use.UNCHECKED:
        return reason
    try:
        return first_use.failure()
    except (OSError, CudaError) as error:
        return " ".join(str(error).split())


def in_use() -> bool:
    """Whether programs that are traced now are to call the kernels."""
    return jax.default_backend() == "gpu" and unavailable() is None


__all__ = ["in_use", "load", "source", "unavailable"]
