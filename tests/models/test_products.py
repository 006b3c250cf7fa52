"""Products of few rows with large weights; one for queries, keys and values in place of two."""

import dataclasses
import gc
import re
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runtime import SPARSE, engine, random_model, slow_except
from tiny import normal

from infinigen_jax import Engine, load
from infinigen_jax.models import blueprint
from infinigen_jax.models.linear import Linear, join, split
from infinigen_jax.models.llama import Embedding, Layer
from infinigen_jax.models.products import FEW_ROWS, product
from infinigen_jax.models.small_weights import rows_of
from infinigen_jax.transfer import Transfer


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
        a = jnp.zeros((50, config.hidden_size), x.dtype)
        return [layer.attention_output(x, a), layer.finish_query(x.reshape(50, -1), positions)]

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
    np.testing.assert_allclose(program(state, a), a @ weight.T + bias[...][None], atol=1e-4)


@pytest.mark.parametrize("name", slow_except(["qwen2", "qwen3"], "qwen2"))
def test_a_layer_of_either_form_is_the_same(name: str):
    model = random_model(name)
    config, params = model.config, model.params["layers"][1]
    joined = join(params)
    width = config.query_width
    assert "q" not in joined
    assert len(joined["qkv"]["weight"]) == width + config.row_width
    assert join(joined) is joined and split(params, width) is params
    jax.tree.map(np.testing.assert_array_equal, split(joined, width), params)
    architecture = blueprint(config, model.dtype)
    a = jnp.asarray(normal(3, config.hidden_size))
    positions = jnp.arange(3, dtype=jnp.int32)

    @jax.jit
    def project(form):
        layer = architecture.layer(form)
        return layer.query(a, positions), *layer.key_value(a, positions)

    for mine, expected in zip(project(joined), project(params), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)


def test_a_layer_has_one_product_for_the_three():
    model = random_model("gqa")
    architecture, params = blueprint(model.config, model.dtype), join(model.params["layers"][0])
    a, positions = jnp.ones((1, model.config.hidden_size)), jnp.zeros(1, jnp.int32)

    def project(params, a):
        layer = architecture.layer(params)
        return layer.query(a, positions), layer.key_value(a, positions)

    compiled = jax.jit(project).lower(params, a).compile().as_text()
    assert compiled is not None and compiled.count(" dot(") == 1


def test_only_where_rows_are_read_in_place(monkeypatch):
    here = engine("gqa")
    assert all("qkv" in layer for layer in here.runtime.weights.params["layers"])
    monkeypatch.setattr("infinigen_jax.engine.runtime.make_transfer", lambda name: Transfer())
    moved = Engine(here.model, policy=SPARSE, dense_layers=1)
    assert all("qkv" not in layer for layer in moved.runtime.weights.params["layers"])


def test_a_model_is_loaded_joined_so_that_an_engine_copies_nothing():
    model = load("tiny-llama")
    params = Engine(model, policy=SPARSE).runtime.weights.params
    for mine, given in zip(params["layers"], model.params["layers"], strict=True):
        place = given["qkv"]["weight"].unsafe_buffer_pointer()
        assert mine["qkv"]["weight"].unsafe_buffer_pointer() == place
    assert all("qkv" not in layer for layer in load("tiny-llama", weights="host").params["layers"])


def test_no_second_copy_is_kept():
    model = random_model.__wrapped__("gqa")
    weight = weakref.ref(model.params["layers"][0]["q"]["weight"])
    made = Engine(model, policy=SPARSE)
    assert made.model.params["layers"][0] is made.runtime.weights.params["layers"][0]
    del model
    gc.collect()
    assert weight() is None
