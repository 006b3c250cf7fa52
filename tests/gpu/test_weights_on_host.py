"""Weights in host memory: layer l+1's are copied while layer l computes, compiled for a GPU."""

import reading as hlo
import step_programs as sp
from compile_for_gpu import Program

from infinigen_jax.transfer import Transfer

MATRICES = len(sp.MOVED)
# In addition to the weights: activations, fetched rows, and temporaries of the index.
REST = sp.FETCHED_BYTES + sum(sp.MOVED) // 4


def weight_copies(program: Program) -> list[hlo.AsyncPair]:
    return [pair for pair in hlo.async_pairs(program) if pair.start.nbytes in sp.MOVED]


@sp.TRANSFERS
def test_every_layer_hides_the_copy_of_the_next_ones_weights(transfer: Transfer):
    program = sp.fused(transfer, weights_on="host")
    pairs = weight_copies(program)
    assert sorted(p.start.nbytes for p in pairs) == sorted(sp.MOVED * sp.LAYERS)
    for layer in range(sp.LAYERS - 1):
        coming = pairs[MATRICES * (layer + 1) :][:MATRICES]
        assert sorted(pair.start.nbytes for pair in coming) == sorted(sp.MOVED)
        for pair in coming:
            hlo.assert_overlaps(program, pair, f"layer{layer}/")
            assert not hlo.products(pair.between, f"layer{layer + 1}/mlp")


def test_copies_begin_before_attention():
    """With the `cuda` transfer, which waits for no copy."""
    work = hlo.launched(sp.fused(Transfer("cuda"), weights_on="host"))
    starts = [i for i, each in enumerate(work) if each.opcode == "copy-start"]
    assert len(starts) == MATRICES * sp.LAYERS
    for layer in range(1, sp.LAYERS - 1):
        # The first layer's own copies come first, then those that each layer starts for the next.
        own = starts[MATRICES * (layer + 1) :][:MATRICES]
        assert sorted(work[i].nbytes for i in own) == sorted(sp.MOVED)
        earlier = [each for each in work[: own[-1]] if f"/layer{layer}/" in each.op_name]
        assert not [i for i in earlier if "/mlp/" in i.op_name]
        attention = [i for i in earlier if "/attention/" in i.op_name]
        assert all(i.nbytes < 100 for i in attention)  # named after one of equal kernels


@sp.TRANSFERS
def test_weights_are_copied_once_and_two_layers_of_them_are_there(transfer: Transfer):
    program = sp.fused(transfer, weights_on="host")
    copied = [i.nbytes for i in hlo.host_copies(program, min(sp.MOVED))]
    rows = [sp.FETCHED_BYTES] * (sp.LAYERS - sp.DENSE) if transfer.name == "xla" else []
    assert sorted(copied) == sorted(sp.MOVED * sp.LAYERS + [n for n in rows if n >= min(sp.MOVED)])
    made = hlo.large_results(program, min(sp.MOVED))
    assert all(i.opcode == "copy-start" for i in made)
    assert program.memory["temp"] < 2 * sum(sp.MOVED) + REST
    staged = sp.FETCHED_BYTES if transfer.name == "xla" else 0
    assert program.memory["host_temp"] == staged


def test_rows_still_come_during_the_layer():
    program = sp.fused(weights_on="host")
    for layer, pair in zip(sp.FETCHING, sp.row_copies(program), strict=True):
        hlo.assert_overlaps(program, pair, f"layer{layer}/")


def test_a_layer_of_its_own_call_hides_them_too():
    program = sp.fetching_layer("host")
    pairs = weight_copies(program)
    assert sorted(pair.start.nbytes for pair in pairs) == sorted(sp.MOVED)
    for pair in pairs:
        hlo.assert_overlaps(program, pair, "")
    assert_nothing_else_is_copied(program)


def test_a_prompts_layer_hides_them_too():
    program = sp.prompt_layer("host")
    pairs = weight_copies(program)
    assert sorted(pair.start.nbytes for pair in pairs) == sorted(sp.MOVED)
    (work,) = (body for body in hlo.schedule(program).values() if pairs[0].start in body)
    first = next(i for i, each in enumerate(work) if each.op_name.endswith("dot_general"))
    last = max(i for i, each in enumerate(work) if each.op_name.endswith("dot_general"))
    for pair in pairs:
        assert work.index(pair.start) < first < last < work.index(pair.done)
    assert_nothing_else_is_copied(program)


def assert_nothing_else_is_copied(program: Program) -> None:
    """Not the parameters that stay on the device either, with those that are brought."""
    others = [i for i in hlo.copies(program, min(sp.MOVED)) if i.opcode != "copy-start"]
    assert not others
