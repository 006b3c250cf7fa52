"""Layers with a sliding window between others, in a decode step compiled for a GPU.

Layer 0 is dense, 1, 3 and 5 have a window, 2 and 4 are on the host.
"""

import pytest
import step_programs as sp
from compile_for_gpu import Program
from hlo import Instruction, products
from reading import async_pairs, copies, host_copies, large_results, launched

from infinigen_jax.transfer import Transfer, XlaTransfer
from infinigen_jax.transfer.cuda import CudaTransfer

WINDOWS = sp.SLIDING.sliding_layers
ON_HOST = sp.decoder(config=sp.SLIDING).on_host
WINDOW_BYTES = sp.HEADS * sp.WINDOW * sp.ROW
TRANSFERS = pytest.mark.parametrize(
    "transfer", [XlaTransfer(), CudaTransfer()], ids=["xla", "cuda"]
)


def step(transfer: Transfer) -> Program:
    return sp.fused(transfer, config=sp.SLIDING)


def of_layer(program: Program, layer: int) -> list[Instruction]:
    return [i for i in launched(program) if f"/layer{layer}/" in i.op_name]


@TRANSFERS
def test_rows_are_chosen_and_moved_for_the_layers_on_the_host_only(transfer: Transfer):
    program = step(transfer)
    for layer in range(sp.LAYERS):
        scopes = {part for i in of_layer(program, layer) for part in i.op_name.split("/")}
        fetching = {"speculate", "select", "fetch"}
        assert scopes & fetching == (fetching if layer + 1 in ON_HOST else set())
        assert ("tail" in scopes) == (layer in ON_HOST)
    moved = [copy.nbytes for copy in host_copies(program, 1024)]
    assert moved == [sp.FETCHED_BYTES] * (len(ON_HOST) if transfer.name == "xla" else 0)


@TRANSFERS
def test_windows_are_updated_in_place(transfer: Transfer):
    program = step(transfer)
    resident, lengths = len(ON_HOST) * sp.RESIDENT_BYTES, 4 * sp.BATCH
    rings = len(WINDOWS) * WINDOW_BYTES
    assert program.memory["alias"] == sp.LAYER_BYTES + rings + resident + lengths
    # Except fetched rows, nothing as large as half of a window's keys is copied or created.
    limit = WINDOW_BYTES // 4
    on_device = [i for i in copies(program, limit) if i not in host_copies(program)]
    made = [i for i in large_results(program, limit) if "/layer" in i.op_name]
    windows = [i for layer in WINDOWS for i in of_layer(program, layer)]
    assert not on_device and not [i for i in made if i in windows and "/attention/" in i.op_name]


def test_a_layer_with_a_window_hides_the_transfer_for_the_next():
    program = step(XlaTransfer())
    pairs = [pair for pair in async_pairs(program) if pair.start.nbytes == sp.FETCHED_BYTES]
    assert len(pairs) == len(ON_HOST)
    for number, pair in zip(ON_HOST, pairs, strict=True):
        layer = of_layer(program, number - 1)
        mlp = [i for i in layer if "/mlp/" in i.op_name]
        attention = products(layer, "attention")
        assert len(mlp) >= 4 and all(i in pair.between for i in mlp)
        # The projection to q, k and v is one product with the speculated query.
        assert len(attention) >= 3 and all(i in pair.between for i in attention[1:])
