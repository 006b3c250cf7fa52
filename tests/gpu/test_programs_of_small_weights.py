"""Small weights, compiled for a GPU: memory of a decoded matrix, and of making one small."""

import jax
import jax.numpy as jnp
import pytest
from compile_for_gpu import compile_for_gpu, on_device

from infinigen_jax.models.small_weights import (
    AT_ONCE,
    FEW_ROWS,
    decoded_size,
    product,
    shrink_part,
)
from infinigen_jax.settings.engine import WEIGHT_DTYPES

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


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_making_a_matrix_small_takes_little_memory(dtype: str):
    matrix = on_device((50257, 2048))  # of no equal pieces
    program = compile_for_gpu(shrink_part, {"weight": matrix}, keywords={"dtype": dtype})
    assert program.memory["temp"] < 6 * AT_ONCE
