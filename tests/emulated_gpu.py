"""The package's CUDA kernels on the CPU, compiled as C++, and launches of them by programs."""

import collections
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np
import pytest

from infinigen_jax.cuda import calls
from infinigen_jax.cuda.launch import KERNELS, source

HEADER = Path(__file__).with_name("cuda_emulation.h")
OPTIONS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Werror")
OPTIONS += ("-U_FORTIFY_SOURCE",)  # jumps between stacks are refused otherwise


def compiler() -> str | None:
    return shutil.which("g++")


class Emulator:
    """Kernels, compiled once for all processes with this folder."""

    def __init__(self, folder: Path):
        runners = "\n".join(
            f'extern "C" void run_{name}(unsigned blocks, unsigned threads, void** parameters, '
            f"uint64_t seed) {{ emulation::run({name}, blocks, threads, parameters, seed); }}"
            for name in KERNELS
        )
        text = f'#include "{HEADER}"\n{source()}\n{runners}\n'
        number = hashlib.sha256((text + HEADER.read_text() + str(OPTIONS)).encode()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / f"kernels-{number[:16]}.so"
        with filelock.FileLock(f"{library}.lock"):
            if not library.exists():
                file = library.with_suffix(".cpp")
                file.write_text(text)
                made = library.with_suffix(".new")
                command = [compiler() or "g++", *OPTIONS, str(file), "-o", str(made)]
                subprocess.run(command, check=True)
                made.rename(library)
        self.library = ctypes.CDLL(str(library))

    def run(self, kernel: str, blocks: int, threads: int, seed: int, *arguments: Any) -> None:
        """Run on numpy arrays, which it changes, and integers."""
        values = [
            ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else ctypes.c_int(a)
            for a in arguments
        ]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        getattr(self.library, f"run_{kernel}")(blocks, threads, addresses, ctypes.c_uint64(seed))


@functools.cache
def emulated_kernels() -> Emulator:
    """Return the kernels, compiled in the folder of this run's programs."""
    return Emulator(Path(os.environ["JAX_COMPILATION_CACHE_DIR"]))


MARKS = [
    pytest.mark.skipif(compiler() is None, reason="needs g++"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="stands in for a GPU on the CPU"),
]
"""Of the tests that use it."""

UNDEFINED = 0xFF  # bytes of results that a kernel has not written: NaN, -1

most_threads = 64
"""Threads of a block; a kernel may have fewer."""
order = 1
"""Seed of the order in which threads run."""

launched: collections.Counter[str] = collections.Counter()
"""How often each kernel ran. Compiled programs outlive a test, and so does this."""
failing: set[str] = set()
"""Kernels whose launches fail."""
wrong: set[str] = set()
"""Kernels whose first result has other bits than it should."""


def call(kernel: str, operands: Any, results: Any, grid: Any, integers: Any, **options: Any) -> Any:
    """Act like `launch.call`."""

    def run(*arrays: Any) -> tuple[np.ndarray, ...]:
        if kernel in failing:
            raise RuntimeError(f"{kernel} failed")
        inputs = [np.array(x, order="C") for x in arrays]
        outputs = [np.full(x.size * x.dtype.itemsize, UNDEFINED, np.uint8) for x in results]
        for operand, result in (options.get("aliases") or {}).items():
            outputs[result] = inputs[operand].reshape(-1).view(np.uint8)
        blocks, threads = grid
        emulated_kernels().run(
            *(kernel, blocks, min(threads, most_threads), order, *inputs, *outputs, *integers)
        )
        launched[kernel] += 1
        if kernel in wrong:
            outputs[0][:4].view(np.uint32)[:] ^= 0x40000041
        return tuple(
            out.view(like.dtype).reshape(like.shape)
            for out, like in zip(outputs, results, strict=True)
        )

    return tuple(jax.pure_callback(run, results, *operands))


def case_name(case: Any) -> str:
    """Return the name of a case of `check_kernels`, the same in every process."""
    return f"{case.func.__name__} {[x for x in case.args if isinstance(x, int | float)]}"


def install(patch: pytest.MonkeyPatch) -> None:
    """Let the package's functions launch these kernels."""
    launched.clear()
    failing.clear()
    wrong.clear()
    patch.setattr(calls, "call", call)
