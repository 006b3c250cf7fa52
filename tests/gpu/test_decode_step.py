"""XLA's programs for the package's functions: a decode step, a draw, a flush, a prompt's layer.

The claims of docs/gpu.md, each a test.
"""

import jax
import jax.numpy as jnp
import pytest
import reading as hlo
import step_programs as sp
from compile_for_gpu import Program, compile_for_gpu, on_device

from infinigen_jax.prefill.prior_rows import BLOCK
from infinigen_jax.sampling import Sampling, sample, settings_of
from infinigen_jax.transfer import Transfer

BLOCK_BYTES = sp.HEADS * BLOCK * sp.ROW  # of earlier rows that a prompt's layer reads
CUDNN = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax")  # without a mask, with one


def of(work: tuple[hlo.Instruction, ...] | list[hlo.Instruction], scope: str) -> set[str]:
    """Return names of the launches that stem from a named scope."""
    return {i.name for i in work if f"/{scope}/" in i.op_name}


def assert_work_overlaps(program: Program, pair: hlo.AsyncPair, layer: str) -> None:
    """Check that scores, weighted sums, output projection and MLP run while rows are moved."""
    hlo.assert_overlaps(program, pair, layer, before=0)
    mlp = of(hlo.launched(program), f"{layer}mlp")
    assert mlp <= of(pair.between, f"{layer}mlp")
    last = max(i for i, each in enumerate(pair.between) if each.name in mlp)
    assert last >= len(pair.between) - 2, "the copy is awaited after the MLP"


def test_fused_step_overlaps_every_transfer():
    program = sp.fused()
    for number, pair in zip(sp.FETCHING, sp.row_copies(program), strict=True):
        assert_work_overlaps(program, pair, f"layer{number}/")
        assert not of(pair.between, f"layer{number + 1}/attention")


def test_a_hot_set_compiles_with_the_xla_transfer():
    """Missing rows come in a loop, into their entries: moved first, or XLA refuses the program."""
    program = sp.fused(hot_set=2.0)
    assert program.memory["host_temp"] < sp.FETCHED_BYTES


def test_fused_step_copies_rows_and_nothing_else():
    program = sp.fused()
    rows = [copy.nbytes for copy in hlo.host_copies(program, 1024)]
    assert rows == [sp.FETCHED_BYTES] * len(sp.FETCHING)
    # On the device, at most the empty mask that a layer marks its requested slots in.
    mask = sp.HEADS * sp.CAPACITY
    on_host = hlo.host_copies(program)
    others = [copy.nbytes for copy in hlo.copies(program, 1024) if copy not in on_host]
    assert set(others) <= {mask} and len(others) <= len(sp.FETCHING)
    assert not hlo.large_results(program, sp.WEIGHT_BYTES)  # nor a new matrix or cache of a layer
    assert program.memory["temp"] < sp.LAYER_BYTES
    assert program.memory["host_temp"] == sp.FETCHED_BYTES  # one staging buffer serves all layers


def test_fused_step_updates_the_device_cache_in_place():
    dense = sp.DENSE * sp.LAYER_BYTES
    lengths = 4 * sp.BATCH
    resident = (sp.LAYERS - sp.DENSE) * sp.RESIDENT_BYTES
    assert sp.fused().memory["alias"] == dense + resident + lengths


def test_layer_overlaps_its_transfer_and_copies_nothing_else():
    program = sp.fetching_layer()
    (pair,) = sp.row_copies(program)
    assert_work_overlaps(program, pair, "")
    assert [copy.nbytes for copy in hlo.copies(program, 1024)] == [sp.FETCHED_BYTES]
    assert not hlo.large_results(program, sp.WEIGHT_BYTES)
    assert program.memory["alias"] == sp.RESIDENT_BYTES


ALL_FLUSHED = (sp.LAYERS - sp.DENSE) * sp.FLUSHED_BYTES
CHUNK_BYTES = sp.PROMPT * sp.HEADS * sp.ROW
# Bytes that are updated in the host cache; at most staged and copied; more than a new buffer has.
IN_PLACE = {
    "flush": (sp.flush, sp.HOST_BYTES, 0, sp.FLUSHED_BYTES, sp.FLUSHED_BYTES + 1),
    "into a pool": (sp.flush_pool, sp.HOST_BYTES, ALL_FLUSHED, ALL_FLUSHED, sp.LAYER_BYTES),
    "prompt's layer": (sp.prompt_layer, 0, 0, sp.LAYER_BYTES // 4, sp.LAYER_BYTES),
    "chunk's rows": (sp.keep_rows, sp.HOST_BYTES, 0, CHUNK_BYTES, sp.LAYER_BYTES),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_the_host_cache_is_read_and_written_in_place(name):
    """A pool by one scatter, its evicted rows read before; a prompt's earlier rows in blocks."""
    made, updated, staged, copied, new = IN_PLACE[name]
    program = made()
    assert program.memory["host_alias"] == updated and program.memory["host_temp"] <= staged
    hlo.assert_no_copy_larger_than(program, copied)
    assert not hlo.large_results(program, new)


def test_the_host_waits_for_no_loop_of_a_draw():
    """A loop of unknown length stops the host until the end of the step."""
    settings = settings_of([Sampling(temperature=1.0)] * 8)
    shapes = jax.tree.map(lambda x: on_device(x.shape, x.dtype), settings)
    logits, uniform = on_device((8, 32_000), jnp.float32), on_device((8,), jnp.float32)
    program = compile_for_gpu(sample, logits, shapes, uniform)
    loops = [line for line in program.hlo.splitlines() if " while(" in line]
    assert loops and all("known_trip_count" in line for line in loops)


def test_attention_of_a_prompt_by_cudnn():
    """One call for the chunk and one for each block, whose successor is on its way meanwhile."""
    program = sp.prompt_layer(by_cudnn=True)
    reads = [pair for pair in hlo.async_pairs(program) if pair.start.nbytes >= BLOCK_BYTES]
    assert len(reads) == 3  # of the first block, of one further on in either loop
    for pair in reads:
        assert sum(i.target in CUDNN for i in pair.between) == 1
    targets = [i.target for i in hlo.launched(program)]
    assert [targets.count(target) for target in CUDNN] == [2, 1]
    assert program.memory["host_temp"] == 0
    # After attention, XLA splits the product with `down` into eight partial sums, in float32.
    partial_sums = 8 * 4 * sp.BATCH * sp.PROMPT * sp.CONFIG.hidden_size
    assert program.memory["temp"] - partial_sums < 0.4 * sp.prompt_layer().memory["temp"]
    # Nothing as large as a block's scores, in any type.
    scores = sp.BATCH * sp.CONFIG.num_heads * sp.PROMPT * BLOCK
    assert not hlo.large_results(program, 2 * scores + 1)


# Layer 0 is dense, 1, 3 and 5 have a window, 2 and 4 are on the host.
WINDOWS = sp.SLIDING.sliding_layers
ON_HOST = sp.decoder(config=sp.SLIDING).on_host
WINDOW_BYTES = sp.BATCH * sp.WINDOW * sp.SLIDING.windowed.row_width * sp.DTYPE.itemsize


def step(transfer: Transfer) -> Program:
    return sp.fused(transfer, config=sp.SLIDING)


def of_layer(program: Program, layer: int) -> list[hlo.Instruction]:
    return [i for i in hlo.launched(program) if f"/layer{layer}/" in i.op_name]


@sp.TRANSFERS
def test_rows_are_chosen_and_moved_for_the_layers_on_the_host_only(transfer: Transfer):
    program = step(transfer)
    for layer in range(sp.LAYERS):
        scopes = {part for i in of_layer(program, layer) for part in i.op_name.split("/")}
        fetching = {"speculate", "select", "fetch"}
        assert scopes & fetching == (fetching if layer + 1 in ON_HOST else set())
        assert ("tail" in scopes) == (layer in ON_HOST)
    moved = [copy.nbytes for copy in hlo.host_copies(program, 1024)]
    assert moved == [sp.FETCHED_BYTES] * (len(ON_HOST) if transfer.name == "xla" else 0)


@sp.TRANSFERS
def test_windows_are_updated_in_place(transfer: Transfer):
    program = step(transfer)
    resident, lengths = len(ON_HOST) * sp.RESIDENT_BYTES, 4 * sp.BATCH
    rings = len(WINDOWS) * WINDOW_BYTES
    assert program.memory["alias"] == sp.LAYER_BYTES + rings + resident + lengths
    # Except fetched rows, nothing as large as half of a window's keys is copied or created.
    limit = WINDOW_BYTES // 4
    on_device = [i for i in hlo.copies(program, limit) if i not in hlo.host_copies(program)]
    made = [i for i in hlo.large_results(program, limit) if "/layer" in i.op_name]
    windows = [i for layer in WINDOWS for i in of_layer(program, layer)]
    assert not on_device and not [i for i in made if i in windows and "/attention/" in i.op_name]


def test_a_layer_with_a_window_hides_the_transfer_for_the_next():
    program = step(Transfer())
    for number, pair in zip(ON_HOST, sp.row_copies(program), strict=True):
        mlp = [i for i in of_layer(program, number - 1) if "/mlp/" in i.op_name]
        assert len(mlp) >= 4 and all(i in pair.between for i in mlp)
        hlo.assert_overlaps(program, pair, f"layer{number - 1}/")
