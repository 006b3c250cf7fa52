"""Run the package's CUDA kernels on the CPU: compiled as C++ with cuda_emulation.h."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from infinigen_jax.cuda import source
from infinigen_jax.cuda.launch import KERNELS

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
