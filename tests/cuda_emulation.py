"""Run the package's CUDA kernels on the CPU: compiled as C++ with cuda_emulation.h."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from infinigen_jax.cuda import source
from infinigen_jax.cuda.launch import KERNELS

HEADER = Path(__file__).with_name("cuda_emulation.h")
OPTIONS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas", "-Werror")


def compiler() -> str | None:
    """A C++ compiler, if this machine has one."""
    return shutil.which("g++")


class Emulator:
    """The kernels, compiled into `folder`."""

    def __init__(self, folder: Path, options: tuple[str, ...] = ()):
        text = source()
        runners = "\n".join(
            f'extern "C" void run_{name}(unsigned blocks, unsigned threads, void** parameters, '
            f"uint64_t seed) {{ emulation::run({name}, blocks, threads, parameters, seed); }}"
            for name in KERNELS
        )
        file = folder / "kernels.cpp"
        file.write_text(f'#include "{HEADER}"\n{text}\n{runners}\n')
        library = folder / "kernels.so"
        command = [compiler() or "g++", *OPTIONS, *options, str(file), "-o", str(library)]
        subprocess.run(command, check=True)
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
    """The kernels, compiled once for a process."""
    with tempfile.TemporaryDirectory() as folder:
        return Emulator(Path(folder))
