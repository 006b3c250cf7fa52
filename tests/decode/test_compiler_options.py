"""The options that programs are compiled with."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest
from runtime import ALL, engine

from infinigen_jax.cuda.launch import CONCURRENT
from infinigen_jax.decode import compiler_options as compiler
from infinigen_jax.decode.compiler_options import (
    COPIES_IN_FLIGHT,
    LIBRARY,
    PRODUCTS,
    WIDE,
    WIDTH,
    layer_options,
    step_options,
)
from infinigen_jax.decode.layout import Layout
from infinigen_jax.policies import Full
from infinigen_jax.transfer import CudaTransfer


def layout(weights_on_host: bool) -> Layout:
    """Return a layout with only this property."""
    bare = object.__new__(Layout)
    object.__setattr__(bare, "weights_on_host", weights_on_host)
    return bare


LAYOUT, STREAMED = layout(weights_on_host=False), layout(weights_on_host=True)


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XLA_FLAGS", "")


@pytest.mark.parametrize("flags", ["avx512f avx512_vbmi2", "avx512f", None])
def test_long_vectors_where_the_processor_has_them(monkeypatch, tmp_path, flags):
    file = tmp_path / "cpuinfo"
    if flags is not None:
        file.write_text(f"flags\t\t: fpu {flags} sse\n")
    monkeypatch.setattr(compiler, "CPU_INFO", file)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    options = layer_options(LAYOUT)
    assert options == PRODUCTS | (WIDE if flags and "vbmi2" in flags else {})
    assert jax.jit(lambda x: x + 1, compiler_options=options)(jnp.int32(1)) == 2


def test_the_environment_has_precedence(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{WIDTH}=256")
    assert layer_options(LAYOUT) == PRODUCTS
    monkeypatch.setenv("XLA_FLAGS", f"--{WIDTH}=256 --{LIBRARY}=")
    assert layer_options(LAYOUT) == {}


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch, caplog):
    monkeypatch.setattr(compiler, "long_vectors", lambda: False)
    monkeypatch.setattr(compiler, "PRODUCTS", {})
    assert layer_options(STREAMED) == COPIES_IN_FLIGHT
    monkeypatch.setattr(compiler, "COPIES_IN_FLIGHT", {"xla_gpu_no_such_option": 1})
    with caplog.at_level(logging.WARNING):
        assert layer_options(STREAMED) == {}
    assert "no_such_option" in caplog.text


def test_kernels_run_concurrently_where_rows_are_fetched_by_one():
    made = engine("one", ALL).decoder
    by_kernel = dataclasses.replace(made, transfer=CudaTransfer())
    assert CONCURRENT.items() <= step_options(by_kernel).items()
    for other in (made, dataclasses.replace(by_kernel, policy=Full())):
        assert not CONCURRENT.keys() & step_options(other).keys()
