"""Kernels and the `cuda` transfer in programs compiled for GPUs: selection, reuse, overlap."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import reading as hlo
import step_programs as sp
from compile_for_gpu import Program, compile_for_gpu, on_device, on_host

from infinigen_jax.cuda import calls, launch, nvrtc
from infinigen_jax.cuda.launch import KERNELS, TARGET
from infinigen_jax.transfer import Transfer

HOT_SET = 2.0
HOT_ENTRIES = sp.decoder(hot_set=HOT_SET).hot_entries(sp.CAPACITY)


def step_of(program: Program) -> list[hlo.Instruction]:
    """Return the launches of the computation that has the transfers."""
    (body,) = (b for b in hlo.schedule(program).values() if any(map(is_fetch, b)))
    return body


def is_fetch(i: hlo.Instruction) -> bool:
    """Return whether this starts a gather; newer versions of JAX also start parts of its result."""
    return i.opcode == "call-start" and len(i.operands) > 1


@pytest.mark.parametrize("hot_set", [0.0, HOT_SET])
def test_attention_and_mlp_can_run_during_a_fetch(hot_set: float):
    program = sp.fused(Transfer("cuda"), hot_set)
    body = step_of(program)
    fetches = [i for i in body if is_fetch(i)]
    for number, fetch in zip(sp.FETCHING, fetches, strict=True):
        free = hlo.independent(program, fetch)
        for scope in ("attention", "mlp"):
            work = hlo.products(body, f"layer{number}/{scope}")
            there = [i for i in work if i in free]
            # The projection to q, k and v comes before: it is one product with the speculation's.
            assert there and len(work) - len(there) <= (scope == "attention")
        attention = [i.op_name for i in body if f"/layer{number + 1}/attention/" in i.op_name]
        assert any(name not in [i.op_name for i in free] for name in attention)
    # One launch scores the rows, a second one selects, and a third one looks up the hot set; each
    # layer with fetched rows has a launch for them and one for its tail.
    order = [i.op_name.split("/")[-2] for i in body if i.target == TARGET]
    assert order.count("attention") == order.count("tail") == len(sp.FETCHING)
    chosen = ["speculate", "select", *["reuse"] * (hot_set > 0)]
    others = [each for each in order if each not in ("attention", "tail")]
    assert others == chosen * len(sp.FETCHING)


def test_attention_and_the_mlp_can_run_during_a_fetch_by_what_is_resident():
    program = sp.fused(Transfer("cuda"), HOT_SET, speculate_from="resident")
    body = step_of(program)
    fetches = [i for i in body if is_fetch(i)]
    for number, fetch in zip(sp.FETCHING, fetches, strict=True):
        free = hlo.independent(program, fetch)
        mlp, attention = (hlo.products(body, f"layer{number}/{s}") for s in ("mlp", "attention"))
        assert mlp and all(i in free for i in mlp)
        # Attention to all rows does not wait for it; it needs attention to the resident ones.
        resident = [i for i in attention if "/resident/" in i.op_name]
        assert resident and not any(i in free for i in resident)
        assert any(i in free for i in attention)


@pytest.mark.parametrize("hot_set", [0.0, HOT_SET])
def test_a_step_is_one_graph(hot_set: float, tmp_path: Path):
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    sp.fused.__wrapped__(Transfer("cuda"), hot_set, options=dump)
    (file,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    lines = file.read_text().splitlines()
    assert [line for line in lines if line[:1].isdigit()] == [lines[0]]
    assert "kCommandBuffer" in lines[0]
    assert sum("kAsyncStart" in line for line in lines) >= len(sp.FETCHING)


@pytest.mark.parametrize("hot_set", [0.0, HOT_SET])
def test_nothing_is_staged_or_copied(hot_set: float):
    program = sp.fused(Transfer("cuda"), hot_set)
    assert not hlo.host_copies(program, 1024)
    assert program.memory["host_temp"] == 0
    assert not [copy for copy in hlo.copies(program, 1024) if copy.nbytes >= sp.FETCHED_BYTES]
    assert not hlo.large_results(program, sp.LAYER_BYTES)
    hot_rows = sp.HEADS * HOT_ENTRIES * sp.ROW
    in_place = program.memory["alias"] - sp.fused().memory["alias"]
    assert in_place >= (sp.LAYERS - sp.DENSE) * hot_rows * (hot_set > 0)


def test_a_layer_of_its_own_call_fetches_the_same_way():
    program = sp.fetching_layer(transfer=Transfer("cuda"), hot_set=HOT_SET)
    (fetch,) = (i for i in step_of(program) if is_fetch(i))
    mlp = hlo.products(step_of(program), "mlp")
    assert mlp and all(i in hlo.independent(program, fetch) for i in mlp)
    assert not hlo.host_copies(program, 1024)
    assert not [copy for copy in hlo.copies(program, 1024) if copy.nbytes >= sp.FETCHED_BYTES]
    assert program.memory["alias"] >= sp.RESIDENT_BYTES + sp.HEADS * HOT_ENTRIES * sp.ROW


def test_the_directory_of_the_hot_set_is_replaced_in_place():
    b, k, n, h, t = 2, 8, 409, 818, 8192
    arguments = [on_device(s, jnp.int32) for s in [(b, k, n), (b, k), (b,), (b, k, h), (b, k, h)]]
    place = on_device((b, k, t), jnp.int16)
    program = compile_for_gpu(calls.replace_entries, *arguments, place, donate_argnums=(3, 4, 5))
    assert not hlo.copies(program, 1024)
    assert program.memory["alias"] == b * k * (2 * h * 4 + t * 2)


def test_selection_is_one_launch():
    def select(scores: jax.Array, positions: jax.Array):
        return calls.select_rows(scores, positions, positions, 409, 4.0, 4, 32)

    scores, positions = on_device((2, 8, 4, 8192), jnp.float32), on_device((2,), jnp.int32)
    program = compile_for_gpu(select, scores, positions)
    assert [i.target for i in hlo.launched(program)] == [TARGET]


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
        scores = calls.index_scores(q, index)
        chosen, count = calls.select_rows(scores, positions, positions, n, 4.0, 4, 32)
        found = [
            calls.replace_entries(chosen, count, positions, slots, used, x) for x in (place, wide)
        ]
        rest = calls.index_rest(q, index, positions, chosen, count, t // 64, 4, 32, 8)
        layer, (entry, miss, *_) = jnp.int32(0), found[0]
        fetched = calls.gather(host, layer, chosen, count, blocks=16, threads=512)
        hot = hot, entry, miss
        reused = calls.gather(host, layer, chosen, count, *hot, blocks=16, threads=512)
        return found, rest, calls.attend_rows(q, rows, count, None), fetched, reused

    q, index = on_device((b, k, g, d), jnp.float32), on_device((b, k, d // 8 + 1, t), jnp.uint32)
    positions, rows = on_device((b,), jnp.int32), on_device((b, k, n, 2 * d))
    directory = on_device((b, k, h), jnp.int32)
    places = [on_device((b, k, t), dtype) for dtype in (jnp.int16, jnp.int32)]
    host, hot = on_host((1, b, k, t, 2 * d)), on_device((b, k, h, 2 * d))
    given = (q, index, positions, rows, directory, directory, *places, host, hot)
    program = compile_for_gpu(every, *given)
    assert all(program.hlo.count(f".entry {kernel}_entry(") == 1 for kernel in KERNELS)
    assert program.hlo.count(f".target sm_{architecture}") == len(KERNELS)
