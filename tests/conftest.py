"""Strict numerics, checked shapes, and small Hugging Face models."""

import gc
import inspect
import logging
import mmap
import os
import tempfile
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import beartype
import jax
import jaxlib
import jaxtyping
import numpy as np
import pytest
from hypothesis import settings

# Programs run once, and compilation takes most of the time: no LLVM optimisation, and XLA's older
# emitters of CPU code, which are twice as fast. An unknown flag would end the process.
FASTER = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": "false",
    "xla_cpu_parallel_codegen_split_count": 1,
}
with open(Path(jaxlib.__file__).parent / "libjax_common.so", "rb") as library:
    with mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as code:
        # Names that are whole strings: those of former flags are kept as parts of one.
        flags = [
            f"--{name}={value}"
            for name, value in FASTER.items()
            if code.find(f"\0{name}\0".encode()) >= 0
        ]
os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])

# Threads of torch that wait for each other cost processor time, and models are tiny.
os.environ["OMP_NUM_THREADS"] = "1"

# Lowering is faster when operations do not record where they come from.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # of processes that tests start
jax.config.update("jax_traceback_in_locations_limit", 0)

# Few examples of each property; `make fuzz` uses "ci".
settings.register_profile("quick", settings.get_profile("ci"), max_examples=25)
settings.register_profile("ci", settings.get_profile("ci"), max_examples=200)

# Tracing makes millions of objects that live; collections of them took a tenth of the time.
gc.set_threshold(200_000, 50, 100)

# Programs are compiled once for all modules, workers and processes of a run: the first process
# creates a folder, and the others inherit its environment.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = tempfile.TemporaryDirectory(prefix="infinigen-jax-tests-")
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": programs.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    jax.config.update("jax_compilation_cache_dir", programs.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def has_shape(annotation: Any) -> bool:
    """Return whether an annotation has an array's shape."""
    shape = inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray)
    return shape or any(map(has_shape, typing.get_args(annotation)))


def check_shapes(definition: Any, jaxtyped: Any = jaxtyping.jaxtyped) -> Any:
    """Check a function's or a class's shapes once; the hook's own decorator checks all twice."""
    known = {n: x for n, x in definition.__annotations__.items() if not isinstance(x, str)}
    if "<locals>" in definition.__qualname__ or not any(map(has_shape, known.values())):
        return definition
    if inspect.isclass(definition):
        return jaxtyped(definition, typechecker=beartype.beartype)
    definition.__annotations__ = known
    return jaxtyped(beartype.beartype(definition), typechecker=None)


# Before the package is imported.
jaxtyping.jaxtyped = lambda typechecker: check_shapes
jaxtyping.install_import_hook("infinigen_jax", None)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give one worker all files that share a server."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "server" if "/server/" in file else file

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    """Exempt everything imported so far from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def few_collections() -> Iterator[None]:
    """Skip garbage collection between an evaluation's engines: tests have small arrays."""
    with pytest.MonkeyPatch.context() as patch:
        nothing = types.SimpleNamespace(collect=lambda: 0)
        patch.setattr("infinigen_jax.evaluation.session.gc", nothing)
        yield


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """Commands announce no slow work, because on a busy machine any work may be slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinigen_jax.messages.PATIENCE", 600)
        yield


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Undo the effect of `--quiet` on the process."""
    yield
    logging.getLogger("infinigen_jax").setLevel(logging.NOTSET)


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Free compiled programs before a process has too many memory mappings.

    Not after every module, because modules share programs. Linux allows 65,530 mappings;
    12,000 take about 4 GiB.
    """
    yield
    from infinigen_jax.machine.memory_limits import available_host_bytes

    most = 20_000 if available_host_bytes() > 8 << 30 else 12_000
    if Path("/proc/self/maps").read_bytes().count(b"\n") > most:
        jax.clear_caches()


@pytest.fixture(scope="session")
def shallow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the embedded models with fewer layers."""
    from tiny import make_shallow

    from infinigen_jax.loading.load import EMBEDDED, EMBEDDED_FOLDER

    folder = tmp_path_factory.mktemp("embedded")
    for name in EMBEDDED:
        make_shallow(EMBEDDED_FOLDER / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def shallow(shallow_folder: Path) -> Iterator[None]:
    """Replace the embedded models by shallow ones in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinigen_jax.loading.load.EMBEDDED_FOLDER", shallow_folder)
        yield


@pytest.fixture
def longest_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft as many tokens as the settings allow, not as measured times suggest."""
    choose = "infinigen_jax.engine.draft_length.DraftLength.choose"
    monkeypatch.setattr(choose, lambda self, most: min(most, self.most))


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Any]:
    """Return `tiny(family, **config)`, which saves a tiny random model under tmp_path/<family>."""
    from tiny import make_tiny

    return lambda family, **settings: make_tiny(tmp_path / family, family, **settings)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """Return `command(main, *arguments)`, which gives exit status, stdout and stderr."""

    def call(main: Callable[..., Any], *arguments: str | Path) -> tuple[Any, str, str]:
        capsys.readouterr()
        try:
            status = main([str(a) for a in arguments])
        except SystemExit as caught:  # argparse ends like this
            status = caught.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@pytest.fixture
def refused(command: Callable[..., tuple[Any, str, str]]) -> Callable[..., str]:
    """Return `refused(main, *arguments)`, which gives the one line that bad input ends with."""

    def call(main: Callable[..., Any], *arguments: str | Path) -> str:
        status, out, err = command(main, *arguments)
        assert status == 2 and out == "", err
        assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
        return err

    return call


@pytest.fixture
def tokens() -> np.ndarray:
    """Return two sequences of 21 token ids below 96: [2, 21] int32."""
    return np.random.default_rng(7).integers(3, 96, (2, 21)).astype(np.int32)
