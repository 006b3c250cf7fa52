"""The kernels that score the index, in place of XLA and on several devices."""

from typing import Any

import emulated_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infinigen_jax import cuda
from infinigen_jax.cache.layers import Slots
from infinigen_jax.cuda import calls, scoring
from infinigen_jax.selection.select import Request
from infinigen_jax.speculation.index import IndexFormat

pytestmark = emulated_gpu.MARKS


def test_through_xla(monkeypatch: pytest.MonkeyPatch):
    """Requests may have any order."""
    emulated_gpu.install(monkeypatch)
    b, k, g, r, t, n, slots = 2, 2, 3, 24, 640, 100, Slots(4, 32, 64)
    random, index = np.random.default_rng(0), IndexFormat("int4", r)
    query = jnp.asarray(random.normal(0, 1, (b, k, g, r)).astype(np.float32))
    entries = index.encode(jnp.asarray(random.normal(0, 1, (b, k, r, t)).astype(np.float32)))
    requested = random.permuted(np.broadcast_to(np.arange(t, dtype=np.int32), (b, k, t)), axis=2)
    count = jnp.asarray(random.integers(0, n + 1, (b, k)), jnp.int32)
    wanted, positions = Request(jnp.asarray(requested[..., :n]), count), jnp.array([t - 1, 300])

    def results(query: Any, entries: Any) -> tuple:
        rests = (
            index.log_rest(query, entries, wanted, positions, slots, columns) for columns in (0, 5)
        )
        return index.scores(query, entries), *rests

    expected = jax.jit(results)(query, entries)
    monkeypatch.setattr(cuda, "in_use", lambda: True)
    result = jax.jit(lambda *x: results(*x))(query, entries)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), result, expected)
    assert emulated_gpu.launched == {"index_scores": 1, "index_rest": 2}


def test_each_device_scores_and_selects_its_own_part(monkeypatch: pytest.MonkeyPatch):
    """Kernels are called on shards, because XLA cannot divide them."""
    seen = {}

    def run(kernel: str, operands: tuple, outs: tuple, grid: tuple, integers: tuple) -> tuple:
        seen[kernel] = operands[0].shape
        return tuple(jnp.zeros(out.shape, out.dtype) for out in outs)

    monkeypatch.setattr(scoring, "call", run)
    monkeypatch.setattr(calls, "call", run)
    mesh = jax.sharding.AbstractMesh((1, 2), ("data", "model"))
    rows = jax.NamedSharding(mesh, jax.P("data", "model"))
    query = jax.ShapeDtypeStruct((3, 4, 2, 8), jnp.float32, sharding=rows)
    index = jax.ShapeDtypeStruct((3, 4, 2, 128), jnp.uint32, sharding=rows)
    positions = jax.ShapeDtypeStruct(
        (3,), jnp.int32, sharding=jax.NamedSharding(mesh, jax.P("data"))
    )

    @jax.jit
    def chosen(query: jax.Array, index: jax.Array, positions: jax.Array) -> Any:
        scores = scoring.index_scores(query, index)
        return scores, calls.select_rows(scores, positions, positions, 16, 4.0, 4, 32)

    scores, (slots, count) = chosen.trace(query, index, positions).out_info
    assert seen == {"index_scores": (3, 2, 2, 8), "select_rows": (3, 2, 2, 128)}
    shapes = [x.shape for x in (scores, slots, count)]
    assert shapes == [(3, 4, 2, 128), (3, 4, 16), (3, 4)]
