"""CUDA kernels, compiled at run time and launched by XLA's programs.

    gather.cu           gather rows from pinned host memory during other work (transfer/rows.py)
    top.cu, select.cu   select the rows to fetch, in one launch
    replace.cu          update the hot set's directory, in one launch
    tensor.cu, score.cu score a quantised index
    attend.cu           attend to fetched rows

NVRTC, from JAX's CUDA wheels, compiles the sources to PTX (`nvrtc`), which becomes part of XLA's
programs (`launch`, `calls`). `first_use` checks them once on a machine. The environment
variable INFINIGEN_JAX_KERNELS turns them and cuDNN's attention off (`0`), or skips the check
(`unchecked`).

Imports files, selection and what they import. Start reading at launch.py.
"""

import functools
import os

import jax

from infinigen_jax.cuda import first_use, launch, nvrtc
from infinigen_jax.errors import one_line


@functools.cache
def load() -> str | None:
    """Prepare the compilation of the kernels; return None, or a line that says why it failed."""
    if jax.default_backend() != "gpu":
        return "JAX sees no NVIDIA GPU"
    try:
        launch.architecture()
        launch.driver_version()
        nvrtc.Nvrtc.load()
    except Exception as error:  # of the driver, the compiler or JAX; without kernels, XLA works
        return reason_of(error)
    return None


@functools.cache
def unavailable() -> str | None:
    """Return why this process cannot use the kernels, or None; load and check them on first use."""
    switch = os.environ.get(first_use.SWITCH)
    if switch == first_use.OFF:
        return f"{first_use.SWITCH} is {switch}"
    if (reason := load()) or switch == first_use.UNCHECKED:
        return reason
    try:
        return first_use.failure()
    except Exception as error:  # of the driver or the compiler
        return reason_of(error)


def reason_of(error: Exception) -> str:
    """Return an error of a driver, a compiler or JAX as one line."""
    return one_line(str(error)) or type(error).__name__


def in_use() -> bool:
    """Return whether programs traced now should call the kernels."""
    return jax.default_backend() == "gpu" and unavailable() is None
