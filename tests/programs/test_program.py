"""Compiled programs on disk: when one is loaded, and when it is compiled again."""

import dataclasses
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from runtime import SPARSE, engine, random_model, tokens_of, with_config
from tiny import python

from infinigen_jax.engine.engine import Engine
from infinigen_jax.programs import program as module
from infinigen_jax.programs.program import EVERY, SUFFIX, Program, environment, mapped_share


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty folder for programs; JAX's cache, which could save them, is off."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    before: Any = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # it remembers whether it is on
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def kept(folder: Path) -> set[Path]:
    return set(folder.glob("*" + SUFFIX))


class Traced:
    """Function that counts how often it is traced."""

    traces = 0

    def program(self, settings: Any = ()) -> Program:
        def function(x: jax.Array, *, factor: int = 2) -> jax.Array:
            self.traces += 1
            return factor * x

        return Program(function, settings, static_argnames="factor")

    def call(self, program: Program, number: int = 4, **static: int) -> None:
        x = np.arange(number, dtype=np.int32)
        got = program(jnp.asarray(x), **static)
        np.testing.assert_array_equal(got, static.get("factor", 2) * x)


def test_a_program_is_traced_once_for_its_settings_shapes_and_static_arguments(folder):
    traced = Traced()
    base = traced.program("base")
    calls: list[Callable[[], None]] = [
        lambda: traced.call(base),
        lambda: traced.call(traced.program("other")),
        lambda: traced.call(base, number=5),
        lambda: traced.call(base, factor=3),
    ]
    for number, call in enumerate(calls, 1):
        for _ in range(2):
            call()
        assert traced.traces == len(kept(folder)) == number
    traced.call(traced.program("base"))  # loaded
    assert traced.traces == len(calls)


def test_a_process_with_many_programs_frees_the_oldest_and_loads_them_again(folder, monkeypatch):
    """Linux limits the memory mappings of a process, and every program has several."""
    monkeypatch.setattr(module, "_loaded", [])
    monkeypatch.setattr(module, "FEWEST", EVERY)
    traced = Traced()
    programs = [traced.program(i) for i in range(3 * EVERY)]
    monkeypatch.setattr(module, "MOST_MAPPED", 1.0)
    shares = [mapped_share()]
    for number, each in enumerate(programs):
        if number == len(programs) - 1:
            shares.append(mapped_share())
            monkeypatch.setattr(module, "MOST_MAPPED", 0.0)
        traced.call(each)
    few, many, now = *shares, mapped_share()
    assert 0 < few < now < few + 0.7 * (many - few)
    assert [len(each._executables) for each in programs] == [0] * (len(programs) // 2) + [1] * (
        len(programs) // 2
    )
    monkeypatch.setattr(module, "MOST_MAPPED", 1.0)
    for each in programs:
        traced.call(each)
    assert traced.traces == len(programs) and mapped_share() > now


@dataclasses.dataclass(frozen=True)
class Foreign:
    """Setting whose class is outside of the package, like a user's policy."""


def test_programs_with_code_from_elsewhere_are_not_stored(folder):
    """Its imports may change, which no hash of it shows."""
    traced = Traced()
    for _ in range(2):
        traced.call(traced.program((1, Foreign())))
    assert traced.traces == 2 and not kept(folder)


def test_products_of_float32_models_are_exact_on_a_gpu(monkeypatch):
    """Their factors would be rounded to TF32; a precision that the user chose is kept."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jnp.ones((2, 2))

    def lowered(dtype: Any) -> str:
        return Program(jnp.matmul, types.SimpleNamespace(dtype=dtype)).lower(x, x).as_text()

    with jax.default_matmul_precision(None):
        assert "HIGHEST" in lowered(jnp.float32) and "HIGHEST" not in lowered(jnp.bfloat16)
    with jax.default_matmul_precision("tensorfloat32"):
        assert "HIGHEST" not in lowered(jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "positions"), [("fused", 62), ("layerwise", 63)])
def test_an_engine_of_a_float32_model_as_on_a_gpu(monkeypatch, schedule, positions):
    """Wrapped programs keep their static and donated arguments."""
    # A number of positions of no other test, so that all programs are new.
    new = with_config(random_model("gqa"), max_positions=positions)
    on_gpu = types.SimpleNamespace(**vars(jax) | {"default_backend": lambda: "gpu"})
    with jax.default_matmul_precision(None), monkeypatch.context() as patch:
        patch.setattr("infinigen_jax.programs.program.jax", on_gpu)
        tokens = tokens_of(Engine(new, policy=SPARSE, dense_layers=1, schedule=schedule))
    assert tokens == tokens_of(engine("gqa", schedule=schedule))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data.replace(b"ELF", b"\xff\0\xff"),  # XLA crashed on such code
    ],
    ids=["half", "empty", "code"],
)
def test_a_damaged_file_is_compiled_and_written_again(folder, damage):
    traced = Traced()
    traced.call(traced.program())
    (file,) = kept(folder)
    whole = file.read_bytes()
    assert damage(whole) != whole
    file.write_bytes(damage(whole))
    traced.call(traced.program())
    assert traced.traces == 2 and kept(folder) == {file}
    assert len(file.read_bytes()) > len(whole) // 2
    traced.call(traced.program())
    assert traced.traces == 2


def test_other_random_numbers_are_another_environment():
    before = environment.__wrapped__()
    with jax.default_prng_impl("rbg"):
        assert environment.__wrapped__() != before


def test_programs_run_where_the_cache_is_off(folder):
    traced = Traced()
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        traced.call(traced.program())
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert traced.traces == 1 and not kept(folder)


LAPACK = """
import jax, jax.numpy as jnp, numpy as np
from infinigen_jax.programs.program import Program

def inverse(x):
    print("traced")
    return jnp.linalg.inv(x)

matrix = np.array([[2, 1], [1, 3]], np.float32)
np.testing.assert_allclose(Program(inverse, ())(matrix) @ matrix, np.eye(2), atol=1e-5)
"""


def test_a_program_with_lapack_is_traced_by_each_process(folder):
    """Nothing is kept: a loaded program would crash."""
    done = python("-c", LAPACK)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "traced\n" and not kept(folder)


REUSED = """
import jax, jax.numpy as jnp, numpy as np, pathlib, sys
from infinigen_jax.programs.program import SUFFIX, Program

def doubled(x):
    return jnp.where(x > 1, 2 * jnp.sin(x), x)

x = np.arange(4, dtype=np.float32)
for _ in range(2):  # the second one finds the executable of the first in memory
    np.testing.assert_allclose(Program(doubled, ())(x), np.where(x > 1, 2 * np.sin(x), x), 1e-5)
if sys.argv[1:]:
    for file in pathlib.Path(sys.argv[1]).glob("*" + SUFFIX):
        file.unlink()
"""


def test_what_jax_read_from_its_own_cache_is_not_written_again(tmp_path):
    """XLA cannot serialise it: a program from such a file would lack functions."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    cache["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    for arguments in ([str(tmp_path)], []):
        done = python("-c", REUSED, *arguments, **cache)
        assert done.returncode == 0, done.stderr[-2000:]
    assert not kept(tmp_path)
