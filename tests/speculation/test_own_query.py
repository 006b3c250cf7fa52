"""Rows chosen by a layer's own query: where they are attended to in place, with no prefetch."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from runtime import TAILED, random_model, scores_of

from infinigen_jax.checkpoint.skew_file import Basis
from infinigen_jax.engine.engine import Engine
from infinigen_jax.policies import InfiniGen, InfiniGenPaper
from infinigen_jax.settings.pool import Pool
from infinigen_jax.skew.basis import balanced_basis, moments
from infinigen_jax.speculation.query import own_query, partial_keys, speculation_weights
from infinigen_jax.transfer.xla import XlaTransfer


@pytest.mark.slow
def test_its_tail_equals_the_tail_of_a_prefetched_layer():
    """In a model of one layer, both queries are the layer's own; only the tail's code differs."""
    model = random_model("one")
    own = dataclasses.replace(TAILED, query="own", tail_tokens=8)
    ahead = dataclasses.replace(own, query="plain")
    np.testing.assert_allclose(scores_of(model, own), scores_of(model, ahead), rtol=1e-4, atol=1e-4)


def test_the_engine_chooses_it_where_nothing_has_to_be_moved(monkeypatch):
    model = random_model("gqa")

    def query_of(policy, **settings) -> str:
        chosen = Engine(model, policy=policy, **settings).decoder.policy
        assert isinstance(chosen, InfiniGen)
        return chosen.query

    assert query_of(InfiniGen()) == "own"
    assert query_of(InfiniGen(), pool=Pool(tokens=64)) == "own"
    assert query_of(InfiniGen(query="plain")) == "plain"
    assert query_of(InfiniGenPaper()) == "plain"
    monkeypatch.setattr("infinigen_jax.engine.runtime.make_transfer", lambda name: XlaTransfer())
    assert query_of(InfiniGen()) == "plain"
    assert query_of(InfiniGen(query="own")) == "own"


def test_a_narrow_index_tells_of_a_true_query_what_it_can():
    """Scores have the least error of rank r, as of `skew.balanced_basis`.

    Projections of keys on the columns of the index, which are not orthogonal, have a larger one.
    """
    model = random_model("gqa")
    config, rng = model.config, np.random.default_rng(3)
    k, d = config.num_kv_heads, config.head_dim
    spread = np.geomspace(1, 0.01, d)
    mixed = rng.normal(size=(2, k, d, d)) * spread[:, None]
    keys = np.einsum("tkd,kde->tke", rng.normal(size=(2000, k, d)), mixed[0])
    queries = np.einsum("tkd,kde->tke", rng.normal(size=(2000, k, d)), mixed[1])
    ours, theirs, _ = balanced_basis(moments(queries, keys))
    pair = Basis(jnp.asarray(ours, jnp.float32), jnp.asarray(theirs, jnp.float32))
    model = dataclasses.replace(
        model, skew="balanced", bases=(pair,) * config.num_layers, key_mean=None
    )
    columns = d // 4
    weights = speculation_weights(model, 0, columns, query="own", true=True)
    assert weights["inverse"].shape == (k, columns, d)
    index = partial_keys(weights, jnp.asarray(keys, jnp.float32).swapaxes(0, 1)[None], columns)
    asked = jnp.asarray(queries[:50], jnp.float32)
    true = np.einsum("qkd,tkd->qkt", queries[:50], keys)

    def error(weights) -> float:
        query = own_query(weights, asked[:, :, None], columns)
        scores = np.einsum("qkgr,krt->qkt", query, index[0])
        return float(np.square(scores - true).mean())

    np.testing.assert_allclose(
        weights["inverse"], np.linalg.inv(theirs)[:, :columns], rtol=1e-4, atol=1e-4
    )
    least = error({"inverse": pair.query[..., :columns].mT})
    assert error(weights) == pytest.approx(least, rel=1e-3)
    assert error({"inverse": jnp.linalg.pinv(pair.key[..., :columns])}) > 1.3 * least


def test_directions_that_queries_never_took_are_left_out():
    """A head without queries leaves out all directions; every result is finite."""
    model = random_model("gqa")
    config, rng = model.config, np.random.default_rng(3)
    assert config.num_kv_heads == 2
    d = config.head_dim
    basis = rng.normal(size=(2, d, d)).astype(np.float32)
    basis[0] = 0
    basis[1, :, 4] *= 1e-6
    basis[1, :, 5] = 0
    pair = Basis(jnp.asarray(basis), jnp.asarray(basis))
    model = dataclasses.replace(model, skew="balanced", bases=(pair,) * config.num_layers)
    own = np.asarray(speculation_weights(model, 0, d, query="own", true=True)["inverse"])
    assert (own[0] == 0).all() and (own[1, 4:6] == 0).all()
    kept = np.arange(d) != 5
    product = own[1] @ basis[1][:, kept]
    expected = np.eye(d)[:, kept]
    expected[4] = 0
    np.testing.assert_allclose(
        product[:, np.arange(d - 1) != 4], expected[:, np.arange(d - 1) != 4], atol=1e-4
    )
