"""Kernels inside the programs that XLA compiles: as PTX, which XLA launches itself.

A launch by a handler (launch.py) is a call of Python, and ends a CUDA graph. XLA can also compile a
kernel into its program, where it is a node of the graph. It takes PTX whose parameters are pointers
alone, so a kernel is compiled for each combination of its integers, which all layers share. The
driver compiles PTX for its GPU, and reads no version that is newer than the driver.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np

from infinigen_jax.cuda import nvrtc

TARGET = "__gpu$xla.gpu.ptx"
ENTRY = """#define EMBEDDED
{source}
extern "C" __global__ void __launch_bounds__({threads}, {kernel}_blocks)
embedded_{kernel}({parameters}) {{
  call({kernel}, {arguments});
}}
"""


def readable(driver: int) -> bool:
    """Return whether a driver reads the compiler's PTX.

    Args:
        driver: version as `cuDriverGetVersion` gives it, 13010 for 13.1.
    """
    major, minor = map(int, nvrtc.Nvrtc.load().version.split("."))
    return driver >= 1000 * major + 10 * minor


@functools.cache
def ptx(
    source: str,
    architecture: int,
    kernel: str,
    threads: int,
    pointers: int,
    integers: tuple[int, ...],
) -> str:
    """Compile a kernel with its integers as constants.

    Args:
        source: source of all kernels.
        pointers: number of its parameters before the integers.

    Raises:
        OSError, nvrtc.CompileError: it cannot be compiled.
    """
    names = [f"p{i}" for i in range(pointers)]
    text = ENTRY.format(
        source=source,
        kernel=kernel,
        threads=threads,
        parameters=", ".join(f"void* {name}" for name in names),
        arguments=", ".join([*names, *map(str, integers)]),
    )
    return nvrtc.kernels(text, architecture, as_ptx=True).rstrip(b"\0").decode()


def call(
    source: str,
    architecture: int,
    kernel: str,
    operands: tuple[jax.Array, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    aliases: dict[int, int],
    grid: tuple[int, int],
    integers: tuple[int, ...],
) -> Sequence[jax.Array]:
    """Trace a launch of a kernel; arguments as of `launch.call`."""
    pointers = len(operands) + len(results)
    blocks, threads = grid
    one = np.int32(1)
    return jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)(
        *operands,
        name=f"embedded_{kernel}",
        kernel_type="ptx",
        kernel_data=ptx(source, architecture, kernel, threads, pointers, integers),
        **{"grid_x": np.int32(blocks), "grid_y": one, "grid_z": one},
        **{"block_x": np.int32(threads), "block_y": one, "block_z": one},
        shared_mem_bytes=np.int32(0),
        output_indices=np.arange(len(operands), pointers, dtype=np.int32),
    )
