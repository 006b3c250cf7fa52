"""The `cuda` transfer and the kernels of selection and reuse in programs compiled for a GPU.

Handlers are placeholders: this shows what is launched around them, in which order,
and that XLA neither stages nor copies what they work on.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import step_programs as sp
from compile_for_gpu import Program, compile_for_gpu, on_device, on_host
from hlo import Instruction
from reading import copies, host_copies, large_results, launched, schedule

from infinigen_jax import check_kernels as check
from infinigen_jax.cache.hot_set import Replacement
from infinigen_jax.cuda import calls
from infinigen_jax.cuda.embed import TARGET
from infinigen_jax.cuda.launch import LAUNCH, START, WAIT
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer.cuda import CudaTransfer

HOT_SET = 2.0
HOT_ENTRIES = sp.decoder(hot_set=HOT_SET).hot_entries(sp.CAPACITY)


pytestmark = pytest.mark.usefixtures("placeholders")


def step_of(program: Program) -> list[Instruction]:
    """The launches of the computation that has the transfers."""
    (body,) = (b for b in schedule(program).values() if any(i.target == START for i in b))
    return body


@pytest.mark.parametrize("hot_set, embedded", [(0.0, False), (HOT_SET, False), (HOT_SET, True)])
def test_attention_and_mlp_lie_between_start_and_wait(hot_set: float, embedded: bool):
    body, launch = step_of(sp.fused(CudaTransfer(), hot_set, embedded=embedded)), LAUNCH
    if embedded:
        launch = TARGET
        assert not [i for i in body if i.target == LAUNCH]
    order = [i.target for i in body if i.target in (START, WAIT)]
    fetching = range(sp.DENSE - 1, sp.LAYERS - 1)
    assert order == [START, WAIT] * len(fetching)
    starts = [i for i, each in enumerate(body) if each.target == START]
    waits = [i for i, each in enumerate(body) if each.target == WAIT]
    for number, start, wait in zip(fetching, starts, waits, strict=True):
        between = body[start + 1 : wait]
        for scope in ("attention", "mlp"):
            products = [
                i
                for i in body
                if f"/layer{number}/{scope}/" in i.op_name and i.op_name.endswith("dot_general")
            ]
            beside = [i for i in products if i in between]
            # The projection to q, k and v comes before: it is one product with the speculation's.
            assert beside and len(products) - len(beside) <= (1 if scope == "attention" else 0)
        assert not [i for i in between if f"/layer{number + 1}/attention/" in i.op_name]
        assert len(between) >= 10
    # What is started was scored by one launch, chosen by a second, and looked up in the hot set by
    # a third. A layer with fetched rows has a launch for them and one for its tail.
    order = [(i.target, i.op_name.split("/")[-2]) for i in body if i.target in (launch, START)]
    attended = order.count((launch, "attention"))
    assert attended == order.count((launch, "tail")) == len(fetching)
    order = [each for each in order if each[1] not in ("attention", "tail")]
    chosen = [(launch, "speculate"), (launch, "select"), *[(launch, "reuse")] * (hot_set > 0)]
    assert order == [*chosen, (START, "fetch")] * len(fetching)


def test_behind_what_is_resident_a_start_has_attention_and_the_mlp_beside_it():
    body = step_of(sp.fused(CudaTransfer(), HOT_SET, speculate_from="resident"))
    targets = [i.target for i in body]
    starts, waits = ([n for n, t in enumerate(targets) if t == kind] for kind in (START, WAIT))
    fetching = range(sp.DENSE - 1, sp.LAYERS - 1)
    assert len(starts) == len(waits) == len(fetching)
    for number, start, wait in zip(fetching, starts, waits, strict=True):
        between = [i.op_name for i in body[start + 1 : wait]]
        mlp = [i.op_name for i in body if f"/layer{number}/mlp/" in i.op_name]
        assert mlp and all(name in between for name in mlp)
        products = [name for name in between if name.endswith("dot_general")]
        # Attention to all is still to come, attention to what is resident is over.
        assert any(f"/layer{number}/attention/" in name for name in products)
        assert not any("/resident/" in name for name in products)


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
    assert [i.target for i in launched(program)] == [LAUNCH]


@pytest.mark.parametrize("hot_set", [False, True])
def test_what_the_check_gathers_is_under_way_beside_work(hot_set: bool):
    b, k, n, w = 2, 4, 100, 64

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return on_device(shape, dtype)

    wanted = Request(array(b, k, n), array(b, k))
    fetch: check.Fetch = (array(), wanted, None, None)
    if hot_set:
        where = Replacement(array(b, k, n), array(b, k, n, dtype=jnp.bool_))
        fetch = (array(), wanted, array(b, k, 2 * n, w, dtype=jnp.bfloat16), where)
    host = on_host((check.LAYERS, b, k, check.CAPACITY, w))
    x = array(b, 1024, dtype=jnp.float32)
    body = step_of(compile_for_gpu(check.move, check.TRANSFER, check.cumulate, host, fetch, x))
    (work,) = (i for i, each in enumerate(body) if "reduce_window" in each.op_name)
    starts, waits = ([each.target == name for each in body] for name in (START, WAIT))
    assert sum(starts[:work]) == sum(starts) == sum(waits[work:]) == sum(waits) == 1
