"""Products of one row with large weights, in pieces."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from infinigen_jax.models.linear import Linear
from infinigen_jax.models.products import pieces, product


@pytest.mark.parametrize(
    ("inputs", "outputs", "number"),
    [(512, 512, 2), (1376, 512, 4), (512, 2752, 8), (2048, 8192, 8), (1375, 2752, 1), (64, 64, 1)],
)
def test_as_many_pieces_as_pay_and_divide_the_inputs(inputs: int, outputs: int, number: int):
    kernel = jnp.zeros((inputs, outputs))
    assert pieces(jnp.zeros((1, inputs)), kernel) == number
    assert pieces(jnp.zeros((inputs,)), kernel) == number
    assert pieces(jnp.zeros((2, inputs)), kernel) == 1
    assert pieces(jnp.zeros((1, inputs), jnp.bfloat16), kernel) == 1
    assert pieces(jnp.zeros((1, inputs)), kernel.astype(jnp.bfloat16)) == 1


@pytest.mark.parametrize("rows", [(1,), (), (1, 1), (3,)])
def test_the_product_is_that_of_the_matrices(rows: tuple[int, ...]):
    rng = np.random.default_rng(0)
    a = rng.normal(size=(*rows, 512)).astype(np.float32)
    kernel = rng.normal(size=(512, 2752)).astype(np.float32)
    expected = a.astype(np.float64) @ kernel.astype(np.float64)
    found = jax.jit(product)(a, kernel)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only a CPU has products in pieces")
def test_a_projection_is_in_pieces_and_its_weights_are_not_copied():
    projection = Linear(512, 2752, True, jnp.float32)
    graph, state = nnx.split(projection)
    program = jax.jit(lambda state, a: nnx.merge(graph, state)(a))
    row = jnp.ones((1, 512))
    text = program.lower(state, row).compile().as_text()
    assert text is not None and "f32[8,2752]" in text
    assert not re.search(r"= f32\[[\d,]*2752\]\S* (copy|transpose)\(", text)
    kernel, bias = projection.kernel[...], projection.bias
    assert bias is not None
    np.testing.assert_allclose(program(state, row), row @ kernel + bias[...][None], atol=1e-4)
