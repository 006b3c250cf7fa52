"""The `cuda` transfer and the kernels of selection and reuse in programs compiled for a GPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import step_programs as sp
from compile_for_gpu import Program, compile_for_gpu, on_device
from hlo import Instruction, products
from reading import copies, host_copies, independent, large_results, launched, schedule

from infinigen_jax.cuda import calls
from infinigen_jax.cuda.launch import TARGET
from infinigen_jax.transfer.cuda import CudaTransfer

HOT_SET = 2.0
HOT_ENTRIES = sp.decoder(hot_set=HOT_SET).hot_entries(sp.CAPACITY)
FETCHING = range(sp.DENSE - 1, sp.LAYERS - 1)  # layers that fetch for the next


def step_of(program: Program) -> list[Instruction]:
    """Return the launches of the computation that has the transfers."""
    (body,) = (b for b in schedule(program).values() if any(map(is_fetch, b)))
    return body


def is_fetch(i: Instruction) -> bool:
    """Return whether this starts a gather; newer versions of JAX also start parts of its result."""
    return i.opcode == "call-start" and len(i.operands) > 1


@pytest.mark.parametrize("hot_set", [0.0, HOT_SET])
def test_attention_and_mlp_can_run_during_a_fetch(hot_set: float):
    program = sp.fused(CudaTransfer(), hot_set)
    body = step_of(program)
    fetches = [i for i in body if is_fetch(i)]
    for number, fetch in zip(FETCHING, fetches, strict=True):
        free = independent(program, fetch)
        for scope in ("attention", "mlp"):
            work = products(body, f"layer{number}/{scope}")
            there = [i for i in work if i in free]
            # The projection to q, k and v comes before: it is one product with the speculation's.
            assert there and len(work) - len(there) <= (scope == "attention")
        attention = [i.op_name for i in body if f"/layer{number + 1}/attention/" in i.op_name]
        assert any(name not in [i.op_name for i in free] for name in attention)
    # One launch scores the rows, a second one selects, and a third one looks up the hot set; each
    # layer with fetched rows has a launch for them and one for its tail.
    order = [i.op_name.split("/")[-2] for i in body if i.target == TARGET]
    assert order.count("attention") == order.count("tail") == len(FETCHING)
    chosen = ["speculate", "select", *["reuse"] * (hot_set > 0)]
    assert [each for each in order if each not in ("attention", "tail")] == chosen * len(FETCHING)


def test_attention_and_the_mlp_can_run_during_a_fetch_by_what_is_resident():
    program = sp.fused(CudaTransfer(), HOT_SET, speculate_from="resident")
    body = step_of(program)
    fetches = [i for i in body if is_fetch(i)]
    for number, fetch in zip(FETCHING, fetches, strict=True):
        free = independent(program, fetch)
        mlp, attention = (products(body, f"layer{number}/{s}") for s in ("mlp", "attention"))
        assert mlp and all(i in free for i in mlp)
        # Attention to all rows does not wait for it; it needs attention to the resident ones.
        resident = [i for i in attention if "/resident/" in i.op_name]
        assert resident and not any(i in free for i in resident)
        assert any(i in free for i in attention)


@pytest.mark.parametrize("hot_set", [0.0, HOT_SET])
def test_a_step_is_one_graph(hot_set: float, tmp_path: Path):
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_text": True}
    sp.fused.__wrapped__(CudaTransfer(), hot_set, options=dump)
    (file,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    lines = file.read_text().splitlines()
    assert [line for line in lines if line[:1].isdigit()] == [lines[0]]
    assert "kCommandBuffer" in lines[0]
    assert sum("kAsyncStart" in line for line in lines) >= len(FETCHING)


@pytest.mark.parametrize("hot_set", [0.0, HOT_SET])
def test_nothing_is_staged_or_copied(hot_set: float):
    program = sp.fused(CudaTransfer(), hot_set)
    assert not host_copies(program, 1024)
    assert program.memory["host_temp"] == 0
    assert not [copy for copy in copies(program, 1024) if copy.nbytes >= sp.FETCHED_BYTES]
    assert not large_results(program, sp.LAYER_BYTES)
    hot_rows = sp.HEADS * HOT_ENTRIES * sp.ROW
    in_place = program.memory["alias"] - sp.fused().memory["alias"]
    assert in_place >= (sp.LAYERS - sp.DENSE) * hot_rows * (hot_set > 0)


def test_a_layer_of_its_own_call_fetches_the_same_way():
    program = sp.fetching_layer(transfer=CudaTransfer(), hot_set=HOT_SET)
    (fetch,) = (i for i in step_of(program) if is_fetch(i))
    mlp = products(step_of(program), "mlp")
    assert mlp and all(i in independent(program, fetch) for i in mlp)
    assert not host_copies(program, 1024)
    assert not [copy for copy in copies(program, 1024) if copy.nbytes >= sp.FETCHED_BYTES]
    assert program.memory["alias"] >= sp.RESIDENT_BYTES + sp.HEADS * HOT_ENTRIES * sp.ROW


def test_the_directory_of_the_hot_set_is_replaced_in_place():
    b, k, n, h, t = 2, 8, 409, 818, 8192
    arguments = [on_device(s, jnp.int32) for s in [(b, k, n), (b, k), (b,), (b, k, h), (b, k, h)]]
    place = on_device((b, k, t), jnp.int16)
    program = compile_for_gpu(calls.replace_entries, *arguments, place, donate_argnums=(3, 4, 5))
    assert not copies(program, 1024)
    assert program.memory["alias"] == b * k * (2 * h * 4 + t * 2)


def test_selection_is_one_launch():
    def select(scores: jax.Array, positions: jax.Array):
        return calls.select_rows(scores, positions, positions, 409, 4.0, 4, 32)

    program = compile_for_gpu(
        select, on_device((2, 8, 4, 8192), jnp.float32), on_device((2,), jnp.int32)
    )
    assert [i.target for i in launched(program)] == [TARGET]
