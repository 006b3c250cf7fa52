"""The package's kernels compile for GPUs with NVRTC, which needs no GPU."""

import functools

import jax.numpy as jnp
import pytest
from compile_for_gpu import compile_for_gpu, on_device

from infinigen_jax.cuda import calls, embed, launch, nvrtc, scoring, source
from infinigen_jax.cuda.launch import KERNELS, START


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


def test_kernels_on_the_stream_of_xla_are_part_of_its_program(monkeypatch: pytest.MonkeyPatch):
    """All but the gathers, which handlers start."""
    monkeypatch.setattr(launch, "embedded", functools.partial(embed.call, source(), 90))
    b, k, g, d, t, n, h = 2, 2, 4, 64, 512, 32, 64

    def every(q, index, positions, rows, slots, used, place, wide):
        scores = scoring.index_scores(q, index)
        chosen, count = calls.select_rows(scores, positions, positions, n, 4.0, 4, 32)
        found = [
            calls.replace_entries(chosen, count, positions, slots, used, x) for x in (place, wide)
        ]
        rest = scoring.index_rest(q, index, positions, chosen, count, t // 64, 4, 32, 8)
        return found, rest, calls.attend_rows(q, rows, count, None)

    directory = on_device((b, k, h), jnp.int32)
    program = compile_for_gpu(
        every,
        on_device((b, k, g, d), jnp.float32),
        on_device((b, k, d // 8 + 1, t), jnp.uint32),
        on_device((b,), jnp.int32),
        on_device((b, k, n, 2 * d), jnp.bfloat16),
        *(directory, directory),
        *(on_device((b, k, t), dtype) for dtype in (jnp.int16, jnp.int32)),
    )
    entries = [
        f".entry embedded_{kernel}(" for kernel in KERNELS if not kernel.startswith("gather")
    ]
    assert [program.hlo.count(entry) for entry in entries] == [1] * len(entries)
    assert launch.LAUNCH not in program.hlo and START not in program.hlo


@pytest.mark.parametrize("driver, reads", [(12080, False), (12090, True), (13000, True)])
def test_a_driver_reads_no_newer_ptx(monkeypatch: pytest.MonkeyPatch, driver: int, reads: bool):
    monkeypatch.setattr(nvrtc.Nvrtc.load(), "version", "12.9")
    assert embed.readable(driver) == reads
