"""Products of few rows with large weights."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runtime import random_model

from infinigen_jax.models.linear import Linear
from infinigen_jax.models.llama import Embedding, Layer
from infinigen_jax.models.products import FEW_ROWS, most_terms, product
from infinigen_jax.models.small_weights import rows_of


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


@pytest.mark.parametrize("weight_dtype", [None, "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_not_rounded(tied: bool, weight_dtype: Any):
    """In bfloat16, logits of 16 to 32 would be an eighth apart."""
    config = dataclasses.replace(random_model("one").config, tie_embeddings=tied)
    embedding = Embedding(config, jnp.bfloat16)
    head = embedding.tokens if tied else embedding.head
    name = "embedding" if tied else "weight"
    shape = config.vocab_size, config.hidden_size
    matrix = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    setattr(head, name, nnx.Param(matrix))
    if weight_dtype is not None:
        head.shrink(weight_dtype)
        matrix = rows_of(head.weights, config.hidden_size)
    for rows in (1, 2 * FEW_ROWS):
        x = 8 * jax.random.normal(jax.random.key(rows), (rows, shape[1]), jnp.bfloat16)
        exact = matrix if rows == 1 else matrix.astype(jnp.bfloat16)  # decoded for many rows
        expected = np.asarray(embedding.norm(x), np.float64) @ np.asarray(exact, np.float64).T
        np.testing.assert_allclose(embedding.logits(x), expected, rtol=1e-5, atol=1e-4)


def test_scales_are_not_rounded():
    """In bfloat16, 0.22 would be 0.2197."""
    config = random_model("one").config
    shape, positions = (50, config.num_heads, config.head_dim), jnp.arange(50, dtype=jnp.int32)
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)

    def outputs(factor: float) -> list[jax.Array]:
        given = dataclasses.replace(config, residual_scale=factor, query_scale=factor)
        layer = Layer(given, jnp.bfloat16)
        weight = jax.random.normal(jax.random.key(1), layer.o.weight.shape, jnp.bfloat16)
        layer.o.weight = nnx.Param(weight)
        return [layer.attention_output(x), layer.finish_query(x.reshape(50, -1), positions)]

    for scaled, whole in zip(outputs(0.22), outputs(1.0), strict=True):
        expected = (whole.astype(jnp.float32) * 0.22).astype(jnp.bfloat16)
        np.testing.assert_array_equal(scaled, expected)


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
