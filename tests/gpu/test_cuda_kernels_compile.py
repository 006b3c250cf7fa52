"""The package's kernels compile for GPUs with NVRTC, which needs no GPU."""

import pytest

from infinigen_jax.cuda import nvrtc, source
from infinigen_jax.cuda.launch import KERNELS


@pytest.mark.parametrize("architecture", [75, 80, 90, 100])
def test_kernels_compile(architecture: int):
    code = nvrtc.Nvrtc.load().compile(source(), architecture)
    assert code.startswith(b"\x7fELF")
    for kernel in KERNELS:
        assert f".text.{kernel}".encode() in code


def test_a_gpu_newer_than_the_compiler_gets_ptx():
    code = nvrtc.Nvrtc.load().compile(source(), 999)
    assert b".visible .entry gather_rows(" in code and code.endswith(b"\0")


def test_what_does_not_compile_is_shown():
    with pytest.raises(nvrtc.CompileError, match='identifier "nonsense" is undefined'):
        nvrtc.Nvrtc.load().compile("void f() { nonsense(); }", 90)
