"""The package's kernels compile for GPUs with NVRTC, which needs no GPU."""

import jax.numpy as jnp
import pytest
from compile_for_gpu import compile_for_gpu, on_device, on_host

from infinigen_jax.cuda import calls, launch, nvrtc, scoring
from infinigen_jax.cuda.launch import KERNELS


def test_a_gpu_newer_than_the_compiler_gets_code_for_the_newest_known():
    known = nvrtc.Nvrtc.load().architectures()[-1]
    assert f".target sm_{known}" in nvrtc.Nvrtc.load().compile("__global__ void f() {}", 999)


def test_what_does_not_compile_is_shown():
    with pytest.raises(nvrtc.CompileError, match='identifier "nonsense" is undefined'):
        nvrtc.Nvrtc.load().compile("void f() { nonsense(); }", 90)


@pytest.mark.parametrize("architecture", [75, 80, 90, 100])
def test_kernels_are_part_of_the_program(architecture: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "architecture", lambda: architecture)
    monkeypatch.setattr(launch, "ptx", launch.ptx.__wrapped__)
    b, k, g, d, t, n, h = 2, 2, 4, 64, 512, 32, 64

    def every(q, index, positions, rows, slots, used, place, wide, host, hot):
        scores = scoring.index_scores(q, index)
        chosen, count = calls.select_rows(scores, positions, positions, n, 4.0, 4, 32)
        found = [
            calls.replace_entries(chosen, count, positions, slots, used, x) for x in (place, wide)
        ]
        rest = scoring.index_rest(q, index, positions, chosen, count, t // 64, 4, 32, 8)
        layer, (entry, miss, *_) = jnp.int32(0), found[0]
        fetched = calls.gather(host, layer, chosen, count, blocks=16, threads=512)
        hot = hot, entry, miss
        reused = calls.gather(host, layer, chosen, count, *hot, blocks=16, threads=512)
        return found, rest, calls.attend_rows(q, rows, count, None), fetched, reused

    directory = on_device((b, k, h), jnp.int32)
    program = compile_for_gpu(
        every,
        on_device((b, k, g, d), jnp.float32),
        on_device((b, k, d // 8 + 1, t), jnp.uint32),
        on_device((b,), jnp.int32),
        on_device((b, k, n, 2 * d), jnp.bfloat16),
        *(directory, directory),
        *(on_device((b, k, t), dtype) for dtype in (jnp.int16, jnp.int32)),
        on_host((1, b, k, t, 2 * d)),
        on_device((b, k, h, 2 * d), jnp.bfloat16),
    )
    assert all(program.hlo.count(f".entry {kernel}_entry(") == 1 for kernel in KERNELS)
    assert program.hlo.count(f".target sm_{architecture}") == len(KERNELS)
