"""Compiled kernels: their cache, their version, and the error without a compiler."""

import ctypes
from pathlib import Path

import pytest

from infinigen_jax.cuda import nvrtc
from infinigen_jax.cuda.launch import readable


class Compiler:
    """Compiler that counts its calls."""

    version = "1.0"

    def __init__(self):
        self.compiled = 0

    def compile(self, source: str, architecture: int) -> str:
        self.compiled += 1
        return f"{source} for {architecture}"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(nvrtc.Nvrtc, "load", staticmethod(lambda: made))
    return made


def test_code_is_compiled_once(compiler: Compiler, tmp_path: Path):
    folder = tmp_path / "new" / "cache"
    for _ in range(2):
        assert nvrtc.ptx("a", 90, folder) == "a for 90"
        assert nvrtc.ptx("a", 80, folder) == "a for 80"
        assert nvrtc.ptx("b", 90, folder) == "b for 90"
    assert compiler.compiled == len(list(folder.iterdir())) == 3


def test_a_cache_that_cannot_be_written_is_done_without(compiler: Compiler, tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    for _ in range(2):
        assert nvrtc.ptx("a", 90, blocked) == "a for 90"
    assert compiler.compiled == 2


def test_without_the_library_the_wheels_are_named(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    nvrtc.Nvrtc.load.cache_clear()
    try:
        with pytest.raises(OSError, match=r"comes with jax\[cuda12\]"):
            nvrtc.Nvrtc.load()
    finally:
        nvrtc.Nvrtc.load.cache_clear()


CODE = "// Compiled by NVRTC\n.version 9.1\n.target sm_90\n// .version 9.1\n"
READ = {12000: "8.0", 12050: "8.5", 12060: "8.5", 12090: "8.8", 13000: "9.0", 13010: "9.1"}


@pytest.mark.parametrize("driver, version", [*READ.items(), (14000, "9.1")])
def test_the_version_of_ptx_is_one_that_the_driver_reads(driver: int, version: str):
    assert readable(CODE, driver) == CODE.replace(".version 9.1", f".version {version}", 1)
