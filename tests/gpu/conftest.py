"""Tests that compile for a GPU where none is: they need JAX's CUDA plugin and a CPU-only JAX.

`make compile-gpu` makes such an environment; in any other the tests of this folder are skipped.
"""

import jax
import pytest
from compile_for_gpu import cuda_version

from infinigen_jax.cuda import launch


@pytest.fixture(autouse=True)
def gpu_compiler(monkeypatch: pytest.MonkeyPatch):
    """Compile kernels for an H200; skip unless the compiler is installed and only the CPU used."""
    monkeypatch.setattr(launch, "architecture", lambda: 90)
    monkeypatch.setattr(launch, "driver_version", lambda: 13000)
    if cuda_version() is None:
        pytest.skip("needs JAX's CUDA plugin (make compile-gpu)")
    if jax.default_backend() != "cpu":
        pytest.skip("compiles without a GPU: run with JAX_PLATFORMS=cpu")
