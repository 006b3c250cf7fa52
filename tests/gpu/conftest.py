"""Tests that compile for a GPU where none is: they need JAX's CUDA plugin and a CPU-only JAX.

`make compile-gpu` makes such an environment; in any other the tests of this folder are skipped.
"""

import jax
import pytest
from compile_for_gpu import available
from placeholders import register_placeholder

from infinigen_jax.cuda.launch import LAUNCH, START, WAIT


@pytest.fixture(autouse=True)
def gpu_compiler():
    """Skip unless the compiler is installed and nothing but the CPU is in use."""
    if not available():
        pytest.skip("needs JAX's CUDA plugin (make compile-gpu)")
    if jax.default_backend() != "cpu":
        pytest.skip("compiles without a GPU: run with JAX_PLATFORMS=cpu")


@pytest.fixture
def placeholders(gpu_compiler: None) -> None:
    """Let programs compile that call the package's kernels."""
    register_placeholder(LAUNCH, START, WAIT)
