"""Speculation: with every column and the layer's own input, it is the layer's own attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import random_basis, random_model

from infinigen_jax.loading.load import Basis
from infinigen_jax.models import blueprint
from infinigen_jax.selection.select import budget_rows, select
from infinigen_jax.speculation.index import IndexFormat
from infinigen_jax.speculation.query import (
    partial_keys,
    speculate_query,
    speculation_weights,
)

compiled_select = jax.jit(select, static_argnames=("alpha", "size"))

CASES = {
    "opt, absorbed": ("opt", False),
    "opt, with basis": ("opt", True),
    "rope, gqa": ("gqa", True),
    "biases on queries and keys": ("qwen2", True),
    "norms on queries and keys": ("qwen3", True),
}


def inputs(model, batch: int = 3, tokens: int = 37, seed: int = 0):
    """Attention inputs of the current token [b, e] and of cached ones [b, t, e], positions."""
    rng = np.random.default_rng(seed)
    e = model.config.hidden_size
    a = jnp.asarray(rng.normal(size=(batch, e)).astype(np.float32))
    cached = jnp.asarray(rng.normal(size=(batch, tokens, e)).astype(np.float32))
    return a, cached, jnp.asarray([tokens, tokens + 3, tokens + 9][:batch], jnp.int32)


def true_logits(layer, config, a, cached, positions) -> np.ndarray:
    """q . k [b, k, g, t] of the layer itself, computed by head with NumPy."""
    b, t, _ = cached.shape
    at = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    keys = np.asarray(jax.jit(layer.key_value)(cached, at)[0])
    q = np.asarray(jax.jit(layer.query)(a, positions))
    heads = [
        np.einsum("bd,btd->bt", q[:, h], keys[:, :, h // config.group_size])
        for h in range(config.num_heads)
    ]
    return np.stack(heads, 1).reshape(b, config.num_kv_heads, config.group_size, t)


def speculated(model, number, a, cached, positions, columns) -> np.ndarray:
    index = IndexFormat("float32", columns)
    config = model.config
    layer = blueprint(config, model.dtype).layer(model.params["layers"][number])
    b, t, _ = cached.shape
    at = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    weights = speculation_weights(model, number, columns)

    @jax.jit
    def scores(cached, a):
        keys = layer.key_value(cached, at)[0].swapaxes(1, 2)
        entries = index.encode(partial_keys(weights, keys, columns))
        assert entries.shape == (b, config.num_kv_heads, index.entries, t)
        assert entries.dtype == index.dtype
        query = speculate_query(config, layer, weights, a, positions, columns)
        assert query.shape == (b, config.num_kv_heads, config.group_size, columns)
        return index.scores(query, entries)

    found = scores(cached, a)
    assert found.dtype == jnp.float32
    return np.asarray(found)


@pytest.mark.parametrize("case", CASES)
def test_all_columns_and_own_input_give_the_true_logits(case):
    model = random_model(CASES[case][0], with_basis=CASES[case][1])
    config = model.config
    a, cached, positions = inputs(model)
    layer = blueprint(config, model.dtype).layer(model.params["layers"][1])
    true = true_logits(layer, config, a, cached, positions)
    scores = speculated(model, 1, a, cached, positions, config.head_dim)
    np.testing.assert_allclose(scores, true, rtol=1e-5, atol=1e-5 * np.abs(true).max())

    eligible = jnp.ones((3, 37), bool)
    cap = budget_rows(0.3, positions)
    picks = [
        compiled_select(jnp.asarray(x, jnp.float32), eligible, alpha=float("inf"), cap=cap, size=20)
        for x in (true, scores)
    ]
    np.testing.assert_array_equal(picks[0].count, picks[1].count)
    np.testing.assert_array_equal(picks[0].slots, picks[1].slots)
    if config.group_size == 1:
        for row in range(3):
            best = np.argsort(-true[row, 0, 0], kind="stable")[: int(cap[row])]
            assert set(picks[1].slots[row, 0, : int(cap[row])].tolist()) == set(best.tolist())


def test_fewer_columns_are_a_prefix():
    """The index at r columns is a slice of the one at more, and so is the query."""
    for case, (name, with_basis) in CASES.items():
        model = random_model(name, with_basis=with_basis)
        config = model.config
        a, _, positions = inputs(model)
        layer = blueprint(config, model.dtype).layer(model.params["layers"][1])
        d = config.head_dim
        key = jnp.asarray(np.random.default_rng(1).normal(size=(3, config.num_kv_heads, 5, d)))
        key = key.astype(jnp.float32)
        wide, narrow = (speculation_weights(model, 1, r) for r in (d, 3))
        np.testing.assert_allclose(
            partial_keys(narrow, key, 3),
            partial_keys(wide, key, d)[:, :, :3],
            rtol=1e-5,
            atol=1e-6,
            err_msg=case,
        )
        np.testing.assert_allclose(
            speculate_query(config, layer, narrow, a, positions, 3),
            speculate_query(config, layer, wide, a, positions, d)[..., :3],
            rtol=1e-5,
            atol=1e-5,
            err_msg=case,
        )


def test_a_pair_of_inverse_matrices_serves_as_well_as_an_orthogonal_one():
    """The balanced basis: queries by one factor, keys by its inverse transposed."""
    for name in ("opt", "gqa"):
        model = random_model(name, with_basis=True)
        config = model.config
        stretch = jnp.asarray(np.geomspace(8, 1 / 8, config.head_dim), jnp.float32)[None, None]
        bases = []
        for i in range(config.num_layers):
            a = random_basis(config.num_kv_heads, config.head_dim, i).query
            bases.append(Basis(a * stretch, a / stretch))
        balanced = type(model).from_params(
            config, model.params, model.dtype, bases=bases, skew="balanced"
        )
        a, cached, positions = inputs(model)
        layer = blueprint(config, model.dtype).layer(model.params["layers"][1])
        true = true_logits(layer, config, a, cached, positions)
        scores = speculated(balanced, 1, a, cached, positions, config.head_dim)
        np.testing.assert_allclose(scores, true, rtol=1e-5, atol=2e-5 * np.abs(true).max())
