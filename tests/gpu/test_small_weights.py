"""Products with small weights, compiled for a GPU: memory of the decoded matrix."""

import jax
import jax.numpy as jnp
import pytest
from compile_for_gpu import compile_for_gpu, on_device

from infinigen_jax.models.small_weights import FEW_ROWS, decoded_size, product, shrink_part

MATRIX = (8192, 2048)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_decoded_matrix_takes_the_planned_memory(dtype: str):
    part = jax.eval_shape(lambda: shrink_part({"weight": jnp.zeros(MATRIX, jnp.bfloat16)}, dtype))
    part = {name: on_device(x.shape, x.dtype) for name, x in part.items()}
    assert decoded_size({"head": part}, FEW_ROWS) == 0
    rows = 2 * FEW_ROWS
    program = compile_for_gpu(product, on_device((rows, MATRIX[1])), part)
    planned = 2 * decoded_size({"head": part}, rows)
    assert planned == 2 * MATRIX[0] * MATRIX[1]
    workspace = 8 * 2**20  # of the library of matrix products
    assert 0.9 * planned < program.memory["temp"] < planned + workspace
