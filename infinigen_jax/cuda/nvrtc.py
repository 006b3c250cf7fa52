"""Compilation of CUDA source to PTX at run time, with the NVRTC library of JAX's CUDA wheels.

Compiled code is kept in the user's cache folder, one file for each source, architecture and
compiler version; those used least recently are removed beyond KEPT bytes.
"""

import contextlib
import ctypes
import functools
import glob
import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from infinigen_jax.files.atomic import write_if_possible
from infinigen_jax.files.user_cache import cache_root, prune

OPTIONS = ("--std=c++17",)
FOLDERS = ("cu*/lib", "cuda_nvrtc/lib")  # in the package `nvidia` of CUDA 13 and CUDA 12
KEPT = 64 << 20
SYSTEM_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


class CompileError(RuntimeError):
    """NVRTC refused the source; contains its messages."""


def ptx(source: str, architecture: int, folder: Path | None = None) -> str:
    """Return the PTX of a source for an architecture (90 for sm_90), cached or compiled now.

    Raises OSError if NVRTC is missing, and CompileError if the source does not compile.
    """
    nvrtc = Nvrtc.load()
    digest = hashlib.sha256("\0".join((source, *OPTIONS)).encode()).hexdigest()[:16]
    name = f"kernels-{digest}-compute_{architecture}-nvrtc_{nvrtc.version}.ptx"
    path = None
    with contextlib.suppress(OSError, UnicodeError):  # no cache folder, no entry or damage
        path = (cache_root() / "kernels" if folder is None else folder) / name
        return path.read_text()
    code = nvrtc.compile(source, architecture)
    if path is not None:
        write_if_possible(path, code.encode())
        prune(path.parent, KEPT)
    return code


def libraries() -> list[str]:
    """List candidate libraries, best first: those of the wheels, then the system's."""
    paths = []
    spec = importlib.util.find_spec("nvidia")
    for base in (spec.submodule_search_locations or []) if spec else []:
        for folder in FOLDERS:
            paths += sorted(glob.glob(f"{base}/{folder}/libnvrtc.so.*"), reverse=True)
    return [*paths, *SYSTEM_NAMES]


class Nvrtc:
    """The NVRTC library."""

    def __init__(self, library: Any):
        self.library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = f"{major.value}.{minor.value}"

    @staticmethod
    @functools.cache
    def load() -> "Nvrtc":
        """Load the first of `libraries` that works; raise OSError if none does."""
        for name in libraries():
            with contextlib.suppress(OSError):
                return Nvrtc(ctypes.CDLL(name))
        raise OSError("no NVRTC found; it comes with jax[cuda12] and jax[cuda13]")

    def architectures(self) -> list[int]:
        """Return the supported architectures, ascending."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        values = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", values)
        return sorted(values)

    def compile(self, source: str, architecture: int) -> str:
        """Compile to PTX for an architecture, or the newest before it that the library knows."""
        known = [a for a in self.architectures() if a <= architecture]
        if not known:
            raise CompileError(f"NVRTC {self.version} does not support sm_{architecture}")
        options = [f"--gpu-architecture=compute_{known[-1]}".encode()]
        options += [option.encode() for option in OPTIONS]
        program = ctypes.c_void_p()
        self._call(
            "nvrtcCreateProgram",
            *(ctypes.byref(program), source.encode(), b"infinigen_jax.cu", 0, None, None),
        )
        try:
            list_ = (ctypes.c_char_p * len(options))(*options)
            if self.library.nvrtcCompileProgram(program, len(options), list_):
                raise CompileError(self._text(program, "ProgramLog"))
            return self._text(program, "PTX")
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, part: str) -> str:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{part}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{part}", program, text)
        return text.value.decode()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise CompileError(f"{name} failed with NVRTC error {code}")
