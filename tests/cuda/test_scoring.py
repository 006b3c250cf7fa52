"""The kernels that score the index: emulated, against the JAX reference; and through XLA."""

from typing import Any

import emulated_gpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_emulation import compiler, emulated_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from infinigen_jax import cuda
from infinigen_jax.cache.layers import Slots
from infinigen_jax.cuda import calls, scoring
from infinigen_jax.cuda.scoring import LEADING
from infinigen_jax.selection.rest import log_rest
from infinigen_jax.selection.select import Request
from infinigen_jax.speculation.index import BITS, IndexFormat

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="needs g++"),
    pytest.mark.skipif(jax.default_backend() != "cpu", reason="stands in for a GPU on the CPU"),
]

# Sequences, KV heads, group, columns, capacity, and tokens of a block of the rest: heads beyond
# those that share a product, columns that do not fill their words, capacities of less than a tile
# and of several, and one whose rows are not aligned, without a tail (0). Each is compiled once by
# the reference.
SHAPES = [(2, 2, 1, 16, 128, 32), (1, 1, 4, 128, 384, 64), (1, 2, 6, 19, 256, 128)]
SHAPES += [(1, 1, 9, 5, 128, 128), (1, 1, 2, 256, 128, 32), (1, 1, 3, 24, 70, 0)]
encode = jax.jit(IndexFormat.encode, static_argnums=0)
reference_scores = jax.jit(IndexFormat.scores, static_argnums=0)
reference_rest = jax.jit(log_rest, static_argnames="blocks")


def steps_and_lows(index: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the step and start of each token's codes."""
    return tuple(x.view(np.float32) for x in (index[:, :, -1] >> 16 << 16, index[:, :, -1] << 16))


def request(random: np.random.Generator, b: int, k: int, n: int, t: int) -> Request:
    """Slots in any order."""
    slots = np.stack([random.permutation(t)[:n] for _ in range(b * k)]).reshape(b, k, n)
    count = random.integers(0, n + 1, (b, k))
    slots[np.arange(n) >= count[..., None]] = 0
    return Request(jnp.asarray(slots, jnp.int32), jnp.asarray(count, jnp.int32))


@settings(max_examples=20)
@given(
    shape=st.sampled_from(SHAPES),
    seed=st.integers(0, 2**32),
    threads=st.sampled_from([32, 64, 256]),
    tiles=st.integers(1, 4),
    sinks=st.integers(0, 5),
    window=st.sampled_from([1, 9, 32]),
    leading=st.sampled_from([0, *LEADING]),
)
def test_scores_and_rest(
    shape: tuple, seed: int, threads: int, tiles: int, sinks: int, window: int, leading: int
):
    (b, k, g, r, t, tail_block), random = shape, np.random.default_rng(seed)
    form, share, n = IndexFormat("int4", r), tiles * (tail_block or 32), 37
    keys = random.normal(0, 1, (b, k, r, t)) * 10.0 ** random.integers(-2, 2, (1, 1, 1, t))
    query = random.normal(0, 1, (b, k, g, r)).astype(np.float32)
    index = np.asarray(encode(form, jnp.asarray(keys, jnp.float32)))
    step, low = steps_and_lows(index)
    largest = float(np.max(np.abs(low) + step * (2**BITS - 1)))  # magnitude of a key
    terms = max(1, np.abs(query).sum(axis=-1).max() * largest)  # of a score

    def assert_close(result: Any, reference: Any) -> None:
        """Within the rounding of a sum whose terms are that large."""
        np.testing.assert_allclose(result, reference, rtol=2e-6, atol=2e-6 * terms)

    result = np.full((b, k, g, t), np.nan, np.float32)
    grid, sizes = (b * k * -(-t // share), threads, seed % 1000), (g, r, index.shape[2] - 1, t)
    emulated_kernels().run("index_scores", *grid, query, index, result, *sizes, share)
    scores = reference_scores(form, jnp.asarray(query), jnp.asarray(index))
    assert_close(result, scores)
    if not tail_block:
        return

    positions = random.integers(0, t, b).astype(np.int32)
    wanted = request(random, b, k, n, t)
    result = np.full((b, k, g, t // tail_block), np.nan, np.float32)
    entry = np.full((b, k, g, t // tail_block, leading), np.nan, np.float32)
    slots, count = map(np.asarray, wanted[:2])
    emulated_kernels().run(
        *("index_rest", *grid, query, index, positions, slots, count, result, entry),
        *(k, *sizes, share, n, tail_block, sinks, window, leading),
    )
    eligible = Slots(sinks, window).eligible(jnp.asarray(positions), t)[:, None]
    expected = np.asarray(reference_rest(scores, eligible, wanted, blocks=t // tail_block).score)
    # The reference drops terms far below the head's best score, which the kernel keeps.
    best = jnp.max(jnp.where(eligible[:, :, None], scores, -jnp.inf), axis=-1, keepdims=True)
    heavy = expected > np.asarray(best) - 80
    assert_close(result[heavy], expected[heavy])
    light = np.where(best > -np.inf, best, 0) - 70
    assert ((result == -np.inf) | (result < light))[~heavy].all()
    level = np.asarray(reference_rest(0 * scores, eligible, wanted, blocks=t // tail_block).score)
    np.testing.assert_array_equal(result == -np.inf, level == -np.inf)

    if not leading:
        return
    columns = min(leading, r)
    left = np.asarray(eligible & ~wanted.mask(t))
    weights = np.where(left[:, :, None], np.asarray(scores, np.float64), -np.inf)
    weights = weights.reshape(*result.shape, tail_block)
    weights = np.exp(weights - np.where(result == -np.inf, 0, result)[..., None])
    decoded = decode(form, index)[:, :, :columns].reshape(b, k, columns, -1, tail_block)
    mean = np.einsum("bkgms,bkcms->bkgmc", weights, decoded)
    # The scores' rounding, as above, is in the weights.
    bound = largest * (1e-5 + 1e-5 * terms)
    np.testing.assert_allclose(entry[..., :columns], mean, rtol=0, atol=bound)


def decode(index: IndexFormat, entries: np.ndarray) -> np.ndarray:
    """Return the keys in an index [b, k, r, t]."""
    b, k, _, t = entries.shape
    step, low = (x[:, :, None] for x in steps_and_lows(entries))
    codes = entries[:, :, :-1, None] >> np.arange(0, 32, BITS, dtype=np.uint32)[:, None]
    codes = (codes & np.uint32(2**BITS - 1)).reshape(b, k, -1, t)[:, :, : index.columns]
    return codes * step + low


@pytest.mark.parametrize("columns", [0, 5])
def test_through_xla(monkeypatch: pytest.MonkeyPatch, columns: int):
    emulated_gpu.install(monkeypatch)
    b, k, g, r, t, slots = 2, 2, 3, 24, 1152, Slots(4, 32, 64)
    random, index = np.random.default_rng(0), IndexFormat("int4", r)
    query = jnp.asarray(random.normal(0, 1, (b, k, g, r)).astype(np.float32))
    entries = index.encode(jnp.asarray(random.normal(0, 1, (b, k, r, t)).astype(np.float32)))
    wanted = request(random, b, k, 100, t)
    positions = jnp.array([t - 1, 300], jnp.int32)

    def both(query: Any, entries: Any) -> tuple:
        rest = index.log_rest(query, entries, wanted, positions, slots, columns)
        return index.scores(query, entries), rest

    expected = jax.jit(both)(query, entries)
    monkeypatch.setattr(cuda, "in_use", lambda: True)
    result = jax.jit(lambda *x: both(*x))(query, entries)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), result, expected)
    assert emulated_gpu.launched == {"index_scores": 1, "index_rest": 1}


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
