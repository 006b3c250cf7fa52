"""Launches of the kernels, as operations of XLA's programs.

XLA compiles a kernel into a program from PTX and launches it as one of its own: a decode step is a
single CUDA graph without a call of Python. A kernel then takes only pointers as parameters, so it
is compiled for each combination of its integers, which all layers share.

A `concurrent` launch is an asynchronous call in the program. If the program is compiled with
`CONCURRENT`, other work runs from the moment its operands exist until something needs its results.
"""

import ctypes
import functools
import re
from importlib import resources
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from infinigen_jax.cuda import nvrtc

SOURCES = ("top.cu", "gather.cu", "select.cu", "replace.cu", "tensor.cu", "score.cu", "attend.cu")
KERNELS = (
    *("gather_rows", "gather_rows_hot", "select_rows", "replace_entries_16", "replace_entries_32"),
    *("index_scores", "index_rest", "attend_rows"),
)
TARGET = "__gpu$xla.gpu.ptx"
# Option of XLA's compiler: the nodes of a program's CUDA graph depend on each other by the buffers
# they use. By default they run in the order of the program.
CONCURRENT: dict[str, int | str] = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
ASYNCHRONOUS = {"_xla_stream_annotation": "1", "inlineable": "false"}
# The XLA of JAX 0.12 crashes when it compiles an asynchronous call; the extras for CUDA exclude it.
# Without such calls a program is correct, but weights in host memory take more of the device's.
CALLS = jax.__version_info__ < (0, 12)
ENTRY = """{source}
static_assert({threads} <= {kernel}_threads, "too many threads");
extern "C" __global__ void __launch_bounds__({threads}, {kernel}_blocks)
{kernel}_entry({parameters}) {{
  call({kernel}, {arguments});
}}
"""


def call(
    kernel: str,
    operands: tuple[jax.Array, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    grid: tuple[int, int],
    integers: tuple[int, ...],
    *,
    aliases: dict[int, int] | None = None,
    concurrent: bool = False,
) -> tuple[jax.Array, ...]:
    """Trace a launch of a kernel, whose parameters are pointers to all arrays, then `integers`.

    `grid` is the number of blocks, and of threads per block. `aliases` maps an operand's index to
    that of the result that updates it in place. With `concurrent` other work runs at the same time.
    Raises OSError or `nvrtc.CompileError` if the kernel cannot be compiled.
    """
    (blocks, threads), pointers, one = grid, len(operands) + len(results), np.int32(1)

    def launch(*operands: jax.Array) -> Any:
        return jax.ffi.ffi_call(TARGET, results, input_output_aliases=aliases)(
            *operands,
            name=f"{kernel}_entry",
            kernel_type="ptx",
            kernel_data=ptx(kernel, threads, pointers, integers),
            **{"grid_x": np.int32(blocks), "grid_y": one, "grid_z": one},
            **{"block_x": np.int32(threads), "block_y": one, "block_z": one},
            shared_mem_bytes=np.int32(0),
            output_indices=np.arange(len(operands), pointers, dtype=np.int32),
        )

    if concurrent and CALLS:
        launch = set_xla_metadata(**ASYNCHRONOUS)(jax.jit(launch))
    return tuple(launch(*operands))


def source() -> str:
    """Return the source of all kernels as one translation unit."""
    folder = resources.files("infinigen_jax.cuda")
    return "\n".join(folder.joinpath(name).read_text() for name in SOURCES)


@functools.cache
def ptx(kernel: str, threads: int, pointers: int, integers: tuple[int, ...]) -> str:
    """Compile a kernel for these GPUs, with its integers as constants after `pointers` pointers."""
    names = [f"p{i}" for i in range(pointers)]
    text = ENTRY.format(
        source=source(),
        kernel=kernel,
        threads=threads,
        parameters=", ".join(f"void* {name}" for name in names),
        arguments=", ".join([*names, *map(str, integers)]),
    )
    return readable(nvrtc.ptx(text, architecture()), driver_version())


@functools.cache
def architecture() -> int:
    """Return the lowest compute capability of this process's GPUs: 90 for 9.0."""
    return min(int(device.compute_capability.replace(".", "")) for device in jax.local_devices())


@functools.cache
def driver_version() -> int:
    """Return the CUDA version of the driver, 13010 for 13.1; raise OSError without a driver."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def readable(code: str, driver: int) -> str:
    """Lower the version of PTX to the newest that a driver reads; the kernels need none above 8.0.

    CUDA 12.0 to 12.5 and 13 read (major - 4).minor; 12.6 reads 8.5, 12.7 reads 8.6, and so on.
    """
    major, minor = driver // 1000, driver % 1000 // 10
    newest = major - 4, minor - (major == 12 and minor >= 6)

    def lower(match: re.Match[str]) -> str:
        written = int(match[1]), int(match[2])
        return ".version {}.{}".format(*min(written, newest))

    return re.sub(r"^\.version (\d+)\.(\d+)", lower, code, count=1, flags=re.MULTILINE)
