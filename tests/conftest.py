"""Strict numerics, checked shapes, and small Hugging Face models made on the spot."""

import gc
import mmap
import os
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
import jaxtyping
import numpy as np
import pytest

# Most of the time of these tests is compilation of programs that run once: neither LLVM's
# optimisation nor XLA's newer emitters of CPU code, which take twice as long as the older ones.
# What is in the environment has precedence, and an unknown flag would end the process.
FASTER = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": "false",
    "xla_cpu_parallel_codegen_split_count": 1,
}
with open(Path(jaxlib.__file__).parent / "libjax_common.so", "rb") as library:
    with mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ) as code:
        # Names as strings of their own: those of former flags are kept as parts of one.
        flags = [
            f"--{name}={value}"
            for name, value in FASTER.items()
            if code.find(f"\0{name}\0".encode()) >= 0
        ]
os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])

# Tracing makes millions of objects that live, and collections of them took a tenth of the time.
gc.set_threshold(100_000, 20, 50)

# Programs are compiled once for all modules, workers and processes of a run. (Without a folder of
# their own: the first process to come here makes one, and the others inherit its environment.)
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

# Before anything imports the package: its annotations are checked on every call.
jaxtyping.install_import_hook("infinigen_jax", "beartype.beartype")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


def pytest_collection_finish() -> None:
    """What is imported by now stays, and no later collection looks at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def few_collections() -> Iterator[None]:
    """Evaluations collect garbage between engines, whose arrays are large; not those of tests.

    Among all that torch and compiled programs keep it took a fifth of an evaluation's time.
    """
    with pytest.MonkeyPatch.context() as patch:
        nothing = types.SimpleNamespace(collect=lambda: 0)
        patch.setattr("infinigen_jax.evaluation.session.gc", nothing)
        yield


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """Commands announce no work that takes long: on a busy machine any may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinigen_jax.messages.PATIENCE", 600)
        yield


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Free compiled programs in time: a process may have only so many memory mappings.

    Not behind every module: what the next one uses as well would be traced again. 65,530 are
    allowed, and with 6,000 they take 2 GiB.
    """
    yield
    if Path("/proc/self/maps").read_bytes().count(b"\n") > 6_000:
        jax.clear_caches()


@pytest.fixture(scope="session")
def shallow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the embedded models, with fewer layers."""
    from shallow import make_shallow

    from infinigen_jax.loading.load import EMBEDDED, EMBEDDED_FOLDER

    folder = tmp_path_factory.mktemp("embedded")
    for name in EMBEDDED:
        make_shallow(EMBEDDED_FOLDER / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def shallow(shallow_folder: Path) -> Iterator[None]:
    """The embedded models are those, in this process: for tests of what is around a model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("infinigen_jax.loading.load.EMBEDDED_FOLDER", shallow_folder)
        yield


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Any]:
    """`tiny(family, **config)` saves a tiny random model under tmp_path/<family>."""
    from tiny import make_tiny

    return lambda family, **settings: make_tiny(tmp_path / family, family, **settings)


@pytest.fixture
def tiny_with_tokenizer(tmp_path: Path) -> Callable[..., Any]:
    """Like `tiny`, with a vocabulary of 1024 and the embedded models' tokenizer."""

    def make(family: str, **settings: Any) -> Any:
        from tiny import make_tiny

        from infinigen_jax.loading import load as checkpoint

        made = make_tiny(tmp_path / family, family, **({"vocab_size": 1024} | settings))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(checkpoint.embedded() / name, made.folder / name)
        return made

    return make


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """`command(main, *arguments)` gives exit status, stdout and stderr, in this process."""

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
def tokens() -> np.ndarray:
    """Two sequences of 21 token ids below 96: [2, 21] int32."""
    return np.random.default_rng(7).integers(3, 96, (2, 21)).astype(np.int32)
