"""Products of few rows with large weights."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from infinigen_jax.models.linear import Linear
from infinigen_jax.models.products import FEW_ROWS, most_terms, product


@pytest.mark.parametrize(
    ("count", "number"), [(32, 32), (36, 36), (96, 48), (256, 32), (688, 43), (53, 1)]
)
def test_terms_are_divided_equally(count: int, number: int):
    assert most_terms(count) == number


@pytest.mark.parametrize(
    "rows, dtype",
    [
        *((rows, jnp.float32) for rows in [(1,), (), (1, 2), (2, 3), (0,), (FEW_ROWS + 1,)]),
        ((1,), jnp.bfloat16),
    ],
)
def test_the_product_is_that_of_the_matrices(rows: tuple[int, ...], dtype):
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.normal(size=(*rows, 512)), dtype)
    weight = jnp.asarray(rng.normal(size=(2752, 512)), dtype)
    expected = np.asarray(a, np.float64) @ np.asarray(weight, np.float64).T
    found = jax.jit(product)(a, weight)
    assert found.shape == expected.shape and found.dtype == dtype
    rtol = 1e-4 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=rtol, atol=1e-3)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a CPU's forms")
@pytest.mark.parametrize(
    ("rows", "form"), [(1, "f32[1,2752]"), (2, "f32[2,2752]"), (4, "f32[2752,4]")]
)
def test_a_projection_of_few_rows_reads_its_weights_once(rows: int, form: str):
    projection = Linear(512, 2752, True, jnp.float32)
    graph, state = nnx.split(projection)
    program = jax.jit(lambda state, a: nnx.merge(graph, state)(a))
    a = jnp.ones((rows, 512))
    text = program.lower(state, a).compile().as_text()
    assert text is not None and re.search(rf"= {re.escape(form)}\S* (dot|fusion)\(", text)
    assert not re.search(r"= f32\[(2752,512|512,2752|2752,1,32,16)\]\S* (copy|transpose)\(", text)
    weight, bias = projection.weight[...], projection.bias
    assert bias is not None
    np.testing.assert_allclose(program(state, a), a @ weight.T + bias[...][None], atol=1e-4)
