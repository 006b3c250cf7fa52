"""When the kernels' check runs, and what follows from it; then the cache of compiled code."""

import ctypes
import logging
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from tiny import ROOT

from infinigen_jax import check_kernels as check
from infinigen_jax import cuda
from infinigen_jax.cuda import first_use, launch, nvrtc
from infinigen_jax.cuda.launch import readable
from infinigen_jax.cuda.nvrtc import CompileError

on_the_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="stands in for a GPU")


@on_the_cpu
def test_without_a_gpu_there_is_nothing_to_check(command: Callable[..., Any]):
    expected = "error: the CUDA kernels cannot be checked: JAX sees no NVIDIA GPU\n"
    assert command(check.main) == (2, "", expected)


@on_the_cpu
def test_the_check_is_found_from_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(ROOT))])
    assert first_use.run_check() == (
        "the CUDA kernels cannot be checked: JAX sees no NVIDIA GPU; "
        "INFINIGEN_JAX_KERNELS=unchecked skips the check"
    )


class Machine:
    """Machine whose JAX has GPUs of some `kinds`, and whose check is a process that runs `code`."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path):
        self.patch, self.log = patch, folder / "log"
        self.kinds, self.driver, self.sources = ["H100"], 12080, b"kernels"
        self.check("")
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.delenv(first_use.SWITCH, raising=False)
        patch.setattr(cuda, "load", lambda: None)
        patch.setattr(jax, "local_devices", self.devices)
        compiler = types.SimpleNamespace(version="12.9")
        patch.setattr(first_use.nvrtc.Nvrtc, "load", lambda: compiler)
        patch.setattr(first_use, "driver_version", lambda: self.driver)
        patch.setattr(first_use, "sources", lambda: self.sources)

    def devices(self) -> list[Any]:
        client, device = types.SimpleNamespace(platform_version="cuda"), types.SimpleNamespace
        return [
            device(device_kind=kind, local_hardware_id=i, client=client)
            for i, kind in enumerate(self.kinds)
        ]

    def check(self, code: str) -> None:
        """Set the code of the process, which first logs its environment."""
        variables = (first_use.SWITCH, "XLA_PYTHON_CLIENT_PREALLOCATE")
        told = f"print(*map(os.environ.get, {variables}), file=open({str(self.log)!r}, 'a'))"
        self.patch.setattr(first_use, "CHECK", ("-c", f"import os, sys\n{told}\n{code}"))

    def start(self) -> str | None:
        """Return the answer of `unavailable` in a new process."""
        cuda.unavailable.cache_clear()
        return cuda.unavailable()

    @property
    def checks(self) -> list[str]:
        """Return a line of each check that was run."""
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    yield Machine(monkeypatch, tmp_path)
    cuda.unavailable.cache_clear()


def test_kernels_are_checked_once_and_again_where_something_has_changed(machine, caplog):
    caplog.set_level(logging.INFO)
    changes = [("driver", 13000), ("sources", b"others"), ("kinds", ["H200"])]
    for number, (name, value) in enumerate([("driver", 12080), *changes], 1):
        setattr(machine, name, value)
        for _ in range(2):
            assert machine.start() is None and cuda.unavailable() is None
        assert machine.checks == ["unchecked false"] * number
    assert caplog.messages[0] == "the CUDA kernels are checked before their first use on H100"
    assert len(caplog.messages) == len(machine.checks)


@pytest.mark.parametrize(
    "code, reason",
    [
        (
            "print('gather_rows: as the reference\\nerror: wrong: hot\\nmore'); sys.exit(1)",
            "wrong: hot; INFINIGEN_JAX_KERNELS=0 turns the kernels off",
        ),
        (
            "sys.stderr.write('error: no memory\\n'); sys.exit(2)",
            "no memory; INFINIGEN_JAX_KERNELS=unchecked skips the check",
        ),
        ("import nothing_of_this_name", f"{first_use.WHAT} ended with status 1: ModuleNotFoundE"),
        ("os.kill(os.getpid(), 9)", f"{first_use.WHAT} ended with status -9: ; INFINIGEN"),
    ],
    ids=["wrong", "no memory", "exception", "signal"],
)
def test_a_failure_is_a_line_and_not_remembered(machine, code, reason):
    machine.check(code)
    for _ in range(2):
        said = machine.start()
        assert said is not None and said.startswith(reason) and "\n" not in said
    assert len(machine.checks) == 2
    machine.check("")
    assert machine.start() is None


def test_a_check_that_does_not_end_or_begin(machine, monkeypatch):
    monkeypatch.setattr(first_use, "LIMIT", 0.5)
    machine.check("import time; time.sleep(60)")
    for reason in ("took longer than 0.5 s; ", "cannot be started: "):
        assert (machine.start() or "").startswith(f"{first_use.WHAT} {reason}")
        monkeypatch.setattr(sys, "executable", "/nowhere/python")


def test_a_cache_that_cannot_be_written_is_done_without(machine, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert machine.start() is machine.start() is None
    assert len(machine.checks) == 2


def test_the_switch(machine, monkeypatch):
    for value, reason in (("unchecked", None), ("0", "INFINIGEN_JAX_KERNELS is 0")):
        monkeypatch.setenv("INFINIGEN_JAX_KERNELS", value)
        assert machine.start() == reason and not machine.checks


@pytest.mark.parametrize(
    "error, reason",
    [
        (OSError("libcuda.so.1: cannot open shared object file"), None),
        (CompileError("version failed\nwith NVRTC error 7"), "version failed with NVRTC error 7"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_driver_that_does_not_answer(machine, monkeypatch, error, reason):
    def missing() -> None:
        raise error

    monkeypatch.setattr(first_use, "driver_version", missing)
    assert machine.start() == (reason or str(error))


def test_what_is_checked_is_in_the_sources():
    sources = first_use.sources()
    assert launch.source().splitlines()[0].encode() in sources and b"def check() -> int" in sources


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


def test_a_cache_of_code_that_cannot_be_written_is_done_without(compiler: Compiler, tmp_path: Path):
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
