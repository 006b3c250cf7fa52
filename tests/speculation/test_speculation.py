"""Speculation: with every column and the layer's own input, it is the layer's own attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import random_basis, random_model

from infinigen_jax.loading.load import Basis, Model
from infinigen_jax.models import blueprint
from infinigen_jax.speculation.index import IndexFormat
from infinigen_jax.speculation.query import (
    partial_keys,
    speculate_query,
    speculation_weights,
)


def balanced(name: str) -> Model:
    """With queries by one factor, and keys by its inverse transposed."""
    model = random_model(name, with_basis=True)
    config, bases = model.config, []
    stretch = jnp.asarray(np.geomspace(8, 1 / 8, config.head_dim), jnp.float32)[None, None]
    for i in range(config.num_layers):
        a = random_basis(config.num_kv_heads, config.head_dim, i).query
        bases.append(Basis(a * stretch, a / stretch))
    return Model.from_params(config, model.params, model.dtype, bases=bases, skew="balanced")


CASES = {
    "opt, absorbed": lambda: random_model("opt", with_basis=False),
    "opt, with basis": lambda: random_model("opt", with_basis=True),
    "opt, balanced": lambda: balanced("opt"),
    "rope, gqa": lambda: random_model("gqa"),
    "rope, balanced": lambda: balanced("gqa"),
    "biases on queries and keys": lambda: random_model("qwen2"),
    "norms on queries and keys": lambda: random_model("qwen3"),
}


@pytest.mark.parametrize("case", CASES)
def test_all_columns_and_own_input_give_the_true_logits(case):
    """And with fewer columns, index and query are the first ones of those with more."""
    model = CASES[case]()
    config, rng, b, t = model.config, np.random.default_rng(0), 3, 37
    d, k = config.head_dim, config.num_kv_heads
    a = jnp.asarray(rng.normal(size=(b, config.hidden_size)).astype(np.float32))
    cached = jnp.asarray(rng.normal(size=(b, t, config.hidden_size)).astype(np.float32))
    positions = jnp.asarray([t, t + 3, t + 9], jnp.int32)
    at = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    layer = blueprint(config, model.dtype).layer(model.params["layers"][1])
    index, weights = IndexFormat("float32", d), speculation_weights(model, 1, d)
    few = speculation_weights(model, 1, 3)

    @jax.jit
    def compute(cached, a):
        keys = layer.key_value(cached, at)[0].swapaxes(1, 2)
        partial = partial_keys(weights, keys, d), partial_keys(few, keys, 3)
        entries = index.encode(partial[0])
        assert entries.shape == (b, k, index.entries, t) and entries.dtype == index.dtype
        query = speculate_query(config, layer, weights, a, positions, d)
        queries = query, speculate_query(config, layer, few, a, positions, 3)
        return keys, layer.query(a, positions), index.scores(query, entries), partial, queries

    keys, q, scores, (wide, narrow), queries = compute(cached, a)
    assert queries[0].shape == (b, k, config.group_size, d) and scores.dtype == jnp.float32
    grouped = np.asarray(q).reshape(b, k, config.group_size, d)
    true = np.einsum("bkgd,bktd->bkgt", grouped, keys)
    tolerance = (2e-5 if model.skew == "balanced" else 1e-5) * np.abs(true).max()
    np.testing.assert_allclose(scores, true, rtol=1e-5, atol=tolerance)
    np.testing.assert_allclose(narrow, wide[:, :, :3], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(queries[1], queries[0][..., :3], rtol=1e-5, atol=1e-5)
