"""Layers with a sliding window between others, in a decode step compiled for a GPU.

Layer 0 is dense, 1, 3 and 5 have a window, 2 and 4 are on the host.
"""

import pytest
import step_programs as sp
from reading import assert_beside, copies, copies_of, host_copies, in_scope, large_results, launched

from infinigen_jax.transfer import Transfer, XlaTransfer
from infinigen_jax.transfer.cuda import CudaTransfer

WINDOWS = sp.SLIDING.sliding_layers
ON_HOST = sp.decoder(config=sp.SLIDING).on_host
WINDOW_BYTES = sp.HEADS * sp.WINDOW * sp.ROW


@pytest.mark.parametrize("transfer", [XlaTransfer(), CudaTransfer()], ids=["xla", "cuda"])
def test_rows_are_moved_for_layers_on_the_host_only_and_windows_updated_in_place(
    transfer: Transfer,
):
    program = sp.fused(transfer, config=sp.SLIDING)
    layers = [in_scope(launched(program), f"layer{layer}") for layer in range(sp.LAYERS)]
    for layer, work in enumerate(layers):
        scopes = {part for i in work for part in i.op_name.split("/")}
        fetching = {"speculate", "select", "fetch"}
        assert scopes & fetching == (fetching if layer + 1 in ON_HOST else set())
        assert ("tail" in scopes) == (layer in ON_HOST)
    moved = [copy.nbytes for copy in host_copies(program, 1024)]
    assert moved == [sp.FETCHED_BYTES] * (len(ON_HOST) if transfer.name == "xla" else 0)
    resident, lengths = len(ON_HOST) * sp.RESIDENT_BYTES, 4 * sp.BATCH
    rings = len(WINDOWS) * WINDOW_BYTES
    assert program.memory["alias"] == sp.LAYER_BYTES + rings + resident + lengths
    # Nothing as large as half of a window's keys is copied or made anew, rows on their way apart.
    limit = WINDOW_BYTES // 4
    assert not [i for i in copies(program, limit) if i not in host_copies(program)]
    windows = [i for layer in WINDOWS for i in in_scope(layers[layer], "attention")]
    assert not [i for i in large_results(program, limit) if i in windows]


def test_a_layer_with_a_window_hides_the_transfer_for_the_next():
    program = sp.fused(XlaTransfer(), config=sp.SLIDING)
    pairs = copies_of(program, sp.FETCHED_BYTES)
    for number, pair in zip(ON_HOST, pairs, strict=True):
        assert_beside(program, pair, f"layer{number - 1}/", projections=1)
