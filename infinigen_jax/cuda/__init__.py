"""CUDA kernels, compiled at run time and called from XLA's programs.

    gather.cu           gather rows from pinned host memory during XLA's work (transfer/cuda.py)
    top.cu, select.cu   select the rows to fetch, in one launch
    replace.cu          update the hot set's directory, in one launch
    tensor.cu, score.cu score a quantised index
    attend.cu           attend to fetched rows

They need only JAX's CUDA wheels: NVRTC compiles the sources (`nvrtc`). Kernels on XLA's stream are
compiled into its programs (`embed`). Handlers written in Python (`ffi`, `launch`) start the gathers
through the driver API (`driver`), and all kernels where the driver is older than the compiler.
Before the first use on a machine, `infinigen_jax.check_kernels` verifies them (`first_use`). The
environment variable INFINIGEN_JAX_KERNELS turns them off (`0`) or skips the check (`unchecked`).

Imports selection, ops, files, errors. Start reading at launch.py.
"""

import functools
import os
from importlib import resources

import jax

from infinigen_jax.cuda import embed, first_use, launch
from infinigen_jax.cuda.driver import INT, Driver
from infinigen_jax.cuda.launch import Launcher
from infinigen_jax.cuda.nvrtc import kernels
from infinigen_jax.errors import one_line

SOURCES = ("top.cu", "gather.cu", "select.cu", "replace.cu", "tensor.cu", "score.cu", "attend.cu")


def source() -> str:
    """Return the source of all kernels as one translation unit."""
    folder = resources.files("infinigen_jax.cuda")
    return "\n".join(folder.joinpath(name).read_text() for name in SOURCES)


@functools.cache
def load() -> str | None:
    """Load the kernels into this process; return None, or a line with the reason of a failure.

    The first call compiles them or takes them from the cache, loads them into every GPU of JAX and
    registers the FFI targets.
    """
    if jax.default_backend() != "gpu":
        return "JAX sees no NVIDIA GPU"
    try:
        driver = Driver()
        launcher = Launcher(driver, lambda architecture: kernels(source(), architecture))
        ordinals = [device.local_hardware_id for device in jax.local_devices()]
        for ordinal in ordinals:
            launcher.prepare(ordinal)
        launcher.register()
        if embed.readable(driver.get("cuDriverGetVersion", kind=INT)):
            architecture = min(map(driver.compute_capability, ordinals))
            launch.embedded = functools.partial(embed.call, source(), architecture)
    except Exception as error:  # of the driver, the compiler or XLA; without kernels, XLA works
        return _line(error)
    return None


@functools.cache
def unavailable() -> str | None:
    """Return a line with the reason why this process cannot use the kernels, or None.

    The first call loads them, and checks them if this machine has not checked them before.
    """
    switch = os.environ.get(first_use.SWITCH)
    if switch == first_use.OFF:
        return f"{first_use.SWITCH} is {switch}"
    if (reason := load()) or switch == first_use.UNCHECKED:
        return reason
    try:
        return first_use.failure()
    except Exception as error:  # of the driver or the compiler
        return _line(error)


def _line(error: Exception) -> str:
    return one_line(str(error)) or type(error).__name__


def in_use() -> bool:
    """Return whether programs traced now should call the kernels."""
    return jax.default_backend() == "gpu" and unavailable() is None


__all__ = ["in_use", "load", "source", "unavailable"]
