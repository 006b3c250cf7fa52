"""The options that programs are compiled with."""

import logging

import jax
import jax.numpy as jnp
import pytest

from infinigen_jax import compiling
from infinigen_jax.compiling import WIDTH, compiler_options
from infinigen_jax.weights import IN_FLIGHT


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch):
    """Without what other tests found, or the environment asks for."""
    compiler_options.cache_clear()
    monkeypatch.setenv("XLA_FLAGS", "")
    yield
    compiler_options.cache_clear()


@pytest.mark.parametrize("flags", ["avx512f avx512_vbmi2", "avx512f", None])
def test_long_vectors_where_the_processor_has_them(monkeypatch, tmp_path, flags):
    file = tmp_path / "cpuinfo"
    if flags is not None:
        file.write_text(f"flags\t\t: fpu {flags} sse\n")
    monkeypatch.setattr(compiling, "CPU_INFO", file)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    options = compiler_options(weights_on_host=False)
    assert options == ({WIDTH: 512} if flags and "vbmi2" in flags else None)
    compiled = jax.jit(lambda x: x + 1, compiler_options=options)
    assert compiled(jnp.int32(1)) == 2


def test_the_environment_has_precedence(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{WIDTH}=256")
    monkeypatch.setattr(compiling, "long_vectors", lambda: True)
    assert compiler_options(weights_on_host=False) is None


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr(compiling, "long_vectors", lambda: False)
    assert compiler_options(weights_on_host=True) == IN_FLIGHT
    compiler_options.cache_clear()
    monkeypatch.setattr(compiling, "IN_FLIGHT", {"xla_gpu_no_such_option": 1})
    with caplog.at_level(logging.WARNING):
        assert compiler_options(weights_on_host=True) is None
    assert "no_such_option" in caplog.text
