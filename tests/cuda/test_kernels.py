"""The CUDA kernels, run on the CPU with cuda_emulation.h, against NumPy and the JAX reference."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_emulation import compiler, emulated_kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from infinigen_jax.cache.hot_set import HotSet, place_dtype, replacement
from infinigen_jax.cache.layers import Slots
from infinigen_jax.check_kernels import random_request
from infinigen_jax.cuda.calls import SHARE
from infinigen_jax.ops.attention import MASKED, Softmax, join_parts
from infinigen_jax.selection.select import budget_fraction, budget_rows, group_rank, select

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs g++")

GRIDS = st.tuples(st.integers(1, 3), st.sampled_from([32, 64, 128]), st.integers(0, 1000))
"""Blocks, threads, and the seed of the order in which threads run."""


def bytes_of(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.integers(0, 256, shape, np.uint8)


@st.composite
def gathers(draw: Any) -> tuple:
    """Host cache [l, groups, t, bytes], layer, slots [groups, n], counts [groups]."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    layers, groups, n = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 40))
    capacity = n + draw(st.integers(0, 20))
    row = 16 * draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 32, 64])))
    host = bytes_of(random, (layers, groups, capacity, row))
    slots = np.stack([random.permutation(capacity)[:n] for _ in range(groups)]).astype(np.int32)
    counts = random.integers(0, n + 1, groups).astype(np.int32)
    return host, np.array(draw(st.integers(0, layers - 1)), np.int32), slots, counts


@given(gathers(), st.integers(0, 30), st.floats(0, 1), GRIDS)
def test_gathers(arrays: tuple, spare: int, misses: float, grid: tuple):
    """From the host alone, and with a hot set; the padding is left as it was, 7."""
    host, layer, slots, counts = arrays
    _, groups, capacity, row = host.shape
    n = slots.shape[1]
    expected = np.take_along_axis(host[layer], slots[..., None].astype(np.int64), axis=1)
    expected[np.arange(n) >= counts[:, None]] = 7
    rows = np.full((*slots.shape, row), 7, np.uint8)
    shape = groups, capacity, n, row // 16
    emulated_kernels().run("gather_rows", *grid, host, layer, slots, counts, rows, *shape)
    np.testing.assert_array_equal(rows, expected)

    random = np.random.default_rng(grid[2])
    entries = n + spare
    entry = np.stack([random.permutation(entries)[:n] for _ in range(groups)]).astype(np.int32)
    miss = random.random(slots.shape) < misses
    hot = bytes_of(random, (groups, entries, row))
    expected_hot = hot.copy()
    for group in range(groups):
        for i in range(counts[group]):
            if miss[group, i]:
                expected_hot[group, entry[group, i]] = expected[group, i]
            else:
                expected[group, i] = hot[group, entry[group, i]]
    entry[np.arange(n)[None] >= counts[:, None]] = 0  # as a replacement has it
    rows = np.full((*slots.shape, row), 7, np.uint8)
    emulated_kernels().run(
        *("gather_rows_hot", *grid, host, layer, slots, counts, hot, entry, miss, rows, hot),
        *(*shape, entries),
    )
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(hot, expected_hot)


# Few, each compiled once by the reference: sequences, KV heads, group, slots; budget; alpha.
SELECTIONS = [(2, 2, 1, 70, 0.2, 2.0), (1, 1, 1, 2500, 0.05, math.inf), (1, 2, 3, 90, 0.5, 2.0)]
SELECTIONS += [(2, 1, 2, 1500, 0.2, 2.0), (1, 1, 4, 33, 1.0, math.inf), (1, 1, 1, 5, 0.001, 2.0)]
reference_select = jax.jit(select, static_argnames=("alpha", "size"))
reference_rank, reference_replacement = jax.jit(group_rank), jax.jit(replacement)
reference_join = jax.jit(join_parts)


SCORES: dict[str, Callable[[np.random.Generator, Any], np.ndarray]] = {
    "normal": lambda random, shape: random.normal(0, 3, shape),
    "tied": lambda random, shape: random.integers(-2, 3, shape),
    "signs": lambda random, shape: random.choice([0.0, -0.0, 1e-30, -1e-30], shape),
    "wide": lambda random, shape: (
        random.normal(0, 1, shape) * 10.0 ** random.integers(-20, 2, shape)
    ),
}


@settings(max_examples=30)
@given(
    case=st.sampled_from(SELECTIONS),
    kind=st.sampled_from(sorted(SCORES)),
    some=st.booleans(),
    slots_at=st.builds(Slots, st.integers(0, 5), st.integers(1, 9)),
    threads=st.sampled_from([32, 64, 256]),
    seed=st.integers(0, 1000),
)
def test_select(case: tuple, kind: str, some: bool, slots_at: Slots, threads: int, seed: int):
    (b, k, g, t, budget, alpha), random = case, np.random.default_rng(seed)
    scores = SCORES[kind](random, (b, k, g, t)).astype(np.float32)
    if some:
        scores[random.random(scores.shape) < 0.3] = -np.inf
    positions = random.integers(0, t, b).astype(np.int32)
    share = budget_fraction(budget)
    size = max(1, t * share.numerator // share.denominator)
    cap = np.asarray(budget_rows(budget, jnp.asarray(positions)))
    slots = np.full((b, k, size), -7, np.int32)
    count = np.full((b, k), -7, np.int32)
    keys = np.zeros((b, k, 2, t), np.uint32)
    bits = int(np.float32(alpha).view(np.int32))
    emulated_kernels().run(
        *("select_rows", b * k, threads, seed, scores, positions, cap, slots, count, keys),
        *(k, g, t, size, slots_at.sinks, slots_at.window, bits),
    )
    places = np.arange(t)
    eligible = (places >= slots_at.sinks) & (places <= positions[:, None] - slots_at.window)
    expected = reference_select(
        jnp.asarray(scores), jnp.asarray(eligible), alpha=alpha, cap=jnp.asarray(cap), size=size
    )
    np.testing.assert_array_equal(count, expected.count)
    if g == 1 or np.array_equal(slots, expected.slots):
        np.testing.assert_array_equal(slots, expected.slots)
        return
    # The order of summation differs, and with it the last bits of a rank: what was chosen
    # instead must be as good.
    rank = np.asarray(reference_rank(np.where(eligible[:, None, None], scores, -np.inf)))
    for i in np.ndindex(b, k):
        chosen, reference = (x[i][: count[i]] for x in (slots, np.asarray(expected.slots)))
        assert np.all(np.diff(chosen) > 0) and not slots[i][count[i] :].any()
        np.testing.assert_allclose(
            np.sort(rank[i][chosen]), np.sort(rank[i][reference]), rtol=3e-6, atol=3e-6
        )


@settings(max_examples=15)
@given(st.data())
def test_replacement(data: st.DataObject):
    """Steps of a growing sequence, the directory carried from step to step."""
    b, k, n, h, t = data.draw(
        st.sampled_from([(2, 2, 7, 7, 30), (1, 2, 40, 70, 110), (1, 1, 1, 2, 2)])
    )
    threads, seed = data.draw(st.sampled_from([32, 96])), data.draw(st.integers(0, 1000))
    wide = data.draw(st.booleans())
    random = np.random.default_rng(seed)
    hot = HotSet.empty(b, k, h, 2, t, jnp.float32)
    if wide:
        hot = hot._replace(place=hot.place.astype(jnp.int32))
    kernel = "replace_entries_32" if wide else "replace_entries_16"
    assert wide or place_dtype(h) == jnp.int16
    positions = random.integers(0, 5, b).astype(np.int32)
    for step in range(4):
        # Near each other, so that requests of different steps overlap.
        request = random_request(b, k, n, min(t, 2 * n), 4 * seed + step)
        expected, replaced = reference_replacement(hot, request, jnp.asarray(positions))
        slots, count = np.asarray(request.slots), np.asarray(request.count)
        entry, miss = np.full((b, k, n), -7, np.int32), np.ones((b, k, n), np.bool_)
        directory = [np.array(x) for x in (hot.slots, hot.used, hot.place)]
        scratch = np.zeros((b, k, h), np.uint32), np.zeros((b, k, n), np.int32)
        emulated_kernels().run(
            *(kernel, b * k, threads, seed, slots, count, positions, *directory),
            *(entry, miss, *directory, *scratch, k, n, h, t),
        )
        found = (entry, miss), (expected.rows, *directory)
        jax.tree.map(np.testing.assert_array_equal, found, (tuple(replaced), tuple(expected)))
        hot = expected
        positions = positions + 1


# Query heads of a KV head, columns, rows, and bound of the scores: lanes without columns, heads
# beyond those attended at a time, several shares, and shares without valid rows.
ATTENTIONS = [(1, 64, 40, None), (4, 128, 300, None), (6, 80, 530, 2.0), (3, 256, 70, None)]


@settings(max_examples=20)
@given(
    st.sampled_from(ATTENTIONS),
    st.integers(0, 2**32),
    st.sampled_from([32, 64, 128]),
    st.booleans(),
)
def test_attend(shape: tuple, seed: int, threads: int, empty: bool):
    (g, d, n, cap), (b, k), random = shape, (2, 2), np.random.default_rng(seed)
    q = random.normal(0, 1, (b, k, g, d)).astype(np.float32)
    rows = random.normal(0, 1, (b, k, n, 2 * d)).astype(jnp.bfloat16)
    count = random.integers(0, n + 1, (b, k)).astype(np.int32)
    if empty:
        count[0, 0] = 0
    valid = np.arange(n) < count[..., None]
    rows[~valid] = np.nan
    shares = -(-n // SHARE)
    parts = [np.full((b, k, shares, g, *last), np.nan, np.float32) for last in ((), (), (d,))]
    bits = int(np.float32(cap or 0).view(np.int32))
    grid = "attend_rows", b * k * shares, threads, seed % 1000
    emulated_kernels().run(*grid, q, rows, count, *parts, g, n, d, shares, bits)
    result = reference_join(Softmax(*map(jnp.asarray, parts)), np.ones((b, k, shares), bool))
    rows[~valid] = 0
    keys, values = np.split(rows.astype(np.float64), 2, axis=-1)
    scores = np.einsum("bkgd,bknd->bkgn", q.astype(np.float64), keys)
    scores = cap * np.tanh(scores / cap) if cap else scores
    peak = np.where(valid[:, :, None], scores, MASKED).max(axis=-1)
    weights = valid[:, :, None] * np.exp(np.minimum(scores - peak[..., None], 0))
    expected = peak, weights.sum(axis=-1), np.einsum("bkgn,bknd->bkgd", weights, values)
    for x, y in zip(result, expected, strict=True):
        np.testing.assert_allclose(x, y, 2e-5, 2e-5)
