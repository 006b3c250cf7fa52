"""One product for queries, keys and values, in place of two."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import SPARSE, engine, random_model
from tiny import normal

from infinigen_jax.engine.engine import Engine
from infinigen_jax.loading.load import load
from infinigen_jax.models import blueprint
from infinigen_jax.models.packed import join, split
from infinigen_jax.transfer import XlaTransfer


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_a_layer_of_either_form_is_the_same(name: str):
    model = random_model(name)
    config, params = model.config, model.params["layers"][1]
    joined = join(params)
    width = config.query_width
    assert "q" not in joined and joined["qkv"]["weight"].shape[0] == width + (
        2 * config.num_kv_heads * config.head_dim
    )
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
    assert all("qkv" in layer for layer in here.weights.params["layers"])
    there = Engine(here.model, policy=SPARSE, dense_layers=1, weights="host")
    assert all("qkv" not in layer for layer in there.weights.params["layers"])
    monkeypatch.setattr("infinigen_jax.engine.runtime.make_transfer", lambda name: XlaTransfer())
    moved = Engine(here.model, policy=SPARSE, dense_layers=1)
    assert all("qkv" not in layer for layer in moved.weights.params["layers"])


def test_a_model_is_loaded_joined_so_that_an_engine_copies_nothing():
    model = load("tiny-llama")
    params = Engine(model, policy=SPARSE).weights.params
    for mine, given in zip(params["layers"], model.params["layers"], strict=True):
        place = given["qkv"]["weight"].unsafe_buffer_pointer()
        assert mine["qkv"]["weight"].unsafe_buffer_pointer() == place
    assert all("qkv" not in layer for layer in load("tiny-llama", weights="host").params["layers"])


def test_no_second_copy_is_kept():
    model = random_model.__wrapped__("gqa")
    weight = weakref.ref(model.params["layers"][0]["q"]["weight"])
    made = Engine(model, policy=SPARSE)
    assert made.model.params["layers"][0] is made.weights.params["layers"][0]
    del model
    gc.collect()
    assert weight() is None
