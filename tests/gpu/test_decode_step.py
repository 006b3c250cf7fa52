"""XLA's programs for the package's functions: a decode step, a flush and a prompt's layer.

The claims of docs/gpu.md, each a test.
"""

import step_programs as sp
from compile_for_gpu import Program
from hlo import Instruction, products
from reading import (
    AsyncPair,
    assert_no_copy_larger_than,
    assert_updated_in_place,
    async_pairs,
    copies,
    host_copies,
    large_results,
    launched,
)

from infinigen_jax.prefill.prior_rows import BLOCK

BLOCK_BYTES = sp.HEADS * BLOCK * sp.ROW  # of earlier rows that a prompt's layer reads
CUDNN = ("__cudnn$fmhaSoftmax", "__cudnn$fmhaScaleBiasSoftmax")  # without a mask, with one
FETCHING = range(sp.DENSE - 1, sp.LAYERS - 1)  # layers of the fused step that fetch for the next


def transfers(program: Program) -> list[AsyncPair]:
    """Return copies of fetched rows to the device, with the work launched meanwhile."""
    return [pair for pair in async_pairs(program) if pair.start.nbytes == sp.FETCHED_BYTES]


def of(work: tuple[Instruction, ...] | list[Instruction], scope: str) -> set[str]:
    """Return names of the launches that stem from a named scope."""
    return {i.name for i in work if f"/{scope}/" in i.op_name}


def assert_work_overlaps(program: Program, pair: AsyncPair, layer: str) -> None:
    """Check that scores, weighted sums, output projection and MLP run while rows are moved.

    Not the projection to q, k and v: it is one product with the speculated query.
    """
    work = launched(program)
    mlp = of(work, f"{layer}mlp")
    assert mlp and mlp <= of(pair.between, f"{layer}mlp")
    attention = products(work, f"{layer}attention")
    overlapping = products(pair.between, f"{layer}attention")
    assert len(overlapping) >= 3 and overlapping == attention
    last = max(i for i, each in enumerate(pair.between) if each.name in mlp)
    assert last >= len(pair.between) - 2, "the copy is awaited after the MLP"


def test_fused_step_overlaps_every_transfer():
    program = sp.fused()
    pairs = transfers(program)
    assert len(pairs) == len(FETCHING)
    for number, pair in zip(FETCHING, pairs, strict=True):
        assert_work_overlaps(program, pair, f"layer{number}/")
        assert not of(pair.between, f"layer{number + 1}/attention")


def test_a_hot_set_compiles_with_the_xla_transfer():
    """Missing rows come in a loop, into their entries: moved first, or XLA refuses the program."""
    program = sp.fused(hot_set=2.0)
    assert program.memory["host_temp"] < sp.FETCHED_BYTES


def test_fused_step_copies_rows_and_nothing_else():
    program = sp.fused()
    rows = [copy.nbytes for copy in host_copies(program, 1024)]
    assert rows == [sp.FETCHED_BYTES] * len(FETCHING)
    # On the device, at most the empty mask that a layer marks its requested slots in.
    mask = sp.HEADS * sp.CAPACITY
    others = [copy.nbytes for copy in copies(program, 1024) if copy not in host_copies(program)]
    assert set(others) <= {mask} and len(others) <= len(FETCHING)
    assert not large_results(program, sp.WEIGHT_BYTES)  # nor a new matrix or cache of a layer
    assert program.memory["temp"] < sp.LAYER_BYTES
    assert program.memory["host_temp"] == sp.FETCHED_BYTES  # one staging buffer serves all layers


def test_fused_step_updates_the_device_cache_in_place():
    dense = sp.DENSE * sp.LAYER_BYTES
    lengths = 4 * sp.BATCH
    resident = (sp.LAYERS - sp.DENSE) * sp.RESIDENT_BYTES
    assert sp.fused().memory["alias"] == dense + resident + lengths


def test_layer_overlaps_its_transfer_and_copies_nothing_else():
    program = sp.fetching_layer()
    (pair,) = transfers(program)
    assert_work_overlaps(program, pair, "")
    assert [copy.nbytes for copy in copies(program, 1024)] == [sp.FETCHED_BYTES]
    assert not large_results(program, sp.WEIGHT_BYTES)
    assert program.memory["alias"] == sp.RESIDENT_BYTES


def test_flush_is_in_place():
    program = sp.flush()
    assert_updated_in_place(program, sp.HOST_BYTES)
    assert program.memory["host_temp"] == 0
    assert_no_copy_larger_than(program, sp.FLUSHED_BYTES)
    assert not large_results(program, sp.FLUSHED_BYTES + 1)


def test_flush_into_a_pool_is_in_place():
    """One scatter to the host; evicted rows are read before it."""
    program, flushed = sp.flush_pool(), (sp.LAYERS - sp.DENSE) * sp.FLUSHED_BYTES
    assert program.memory["host_alias"] == sp.HOST_BYTES
    assert_no_copy_larger_than(program, flushed)
    assert program.memory["host_temp"] <= flushed
    assert not large_results(program, sp.LAYER_BYTES)


def test_prompt_layer_reads_the_host_cache_where_it_is():
    """Earlier rows are read block by block, whatever the capacity."""
    program = sp.prompt_layer()
    assert program.memory["host_temp"] == 0
    assert_no_copy_larger_than(program, sp.LAYER_BYTES // 4)
    assert not large_results(program, sp.LAYER_BYTES)


def test_attention_of_a_prompt_by_cudnn():
    """One call for the chunk and one for each block, whose successor is on its way meanwhile."""
    program = sp.prompt_layer(by_cudnn=True)
    reads = [pair for pair in async_pairs(program) if pair.start.nbytes >= BLOCK_BYTES]
    assert len(reads) == 3  # of the first block, of one further on in either loop
    for pair in reads:
        assert sum(i.target in CUDNN for i in pair.between) == 1
    targets = [i.target for i in launched(program)]
    assert [targets.count(target) for target in CUDNN] == [2, 1]
    assert program.memory["host_temp"] == 0
    # After attention, XLA splits the product with `down` into eight partial sums, in float32.
    partial_sums = 8 * 4 * sp.BATCH * sp.PROMPT * sp.CONFIG.hidden_size
    assert program.memory["temp"] - partial_sums < 0.4 * sp.prompt_layer().memory["temp"]
    # Nothing as large as a block's scores, in any type.
    scores = sp.BATCH * sp.CONFIG.num_heads * sp.PROMPT * BLOCK
    assert not large_results(program, 2 * scores + 1)


def test_a_chunks_rows_are_written_in_place():
    program = sp.keep_rows()
    assert_updated_in_place(program, sp.HOST_BYTES)
    assert program.memory["host_temp"] == 0
    assert_no_copy_larger_than(program, sp.PROMPT * sp.HEADS * sp.ROW)
    assert not large_results(program, sp.LAYER_BYTES)
