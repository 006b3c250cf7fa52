"""The hot set against a plain one in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinigen_jax.cache.host_array import allocate_host, default_mesh, write_span
from infinigen_jax.cache.hot_set import HotSet, Replacement, replacement
from infinigen_jax.ops.span import Span
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer import XlaTransfer, xla

replaced = jax.jit(replacement)


@given(st.data())
@settings(max_examples=25)
def test_requests_find_what_was_fetched_before(data):
    """Rows that the directory has are hits, and the least recently used ones are evicted."""
    b, k = 2, 2
    t, n, h = data.draw(st.sampled_from([(40, 7, 9), (33, 1, 1), (20, 20, 20)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    hot = HotSet.empty(b, k, h, 4, t, jnp.float32)
    last = np.full((b, k, t), -1)  # position that last requested each slot
    for position in range(5):
        slots = np.stack([rng.permutation(t)[:n] for _ in range(b * k)]).reshape(b, k, n)
        counts = rng.integers(0, n + 1, (b, k))
        request = Request(jnp.asarray(slots, jnp.int32), jnp.asarray(counts, jnp.int32))
        before = np.asarray(hot.place)
        hot, made = replaced(hot, request, jnp.full((b,), position, jnp.int32))
        entry, miss = np.asarray(made.entry), np.asarray(made.miss)
        after = np.asarray(hot.place, np.int64)
        for head in np.ndindex(b, k):
            count = counts[head]
            wanted = slots[head][:count]
            np.testing.assert_array_equal(miss[head][:count], before[head][wanted] < 0)
            assert not miss[head][count:].any()
            np.testing.assert_array_equal(after[head][wanted], entry[head][:count])
            assert len(set(entry[head][:count])) == count
            hits = ~miss[head][:count]
            np.testing.assert_array_equal(before[head][wanted][hits], entry[head][:count][hits])
            kept = np.flatnonzero(after[head] >= 0)
            assert len(kept) == min(h, (before[head] >= 0).sum() + miss[head].sum())
            # `slots` is the inverse of `place`.
            np.testing.assert_array_equal(np.asarray(hot.slots)[head][after[head][kept]], kept)
            assert (np.asarray(hot.slots)[head] >= 0).sum() == len(kept)
            last[head][wanted] = position
            evicted = (before[head] >= 0) & (after[head] < 0)
            assert not evicted.any() or last[head][evicted].max() <= last[head][kept].min()


def test_sizes():
    """Entries have the narrowest dtype; a request may not be larger than the hot set."""
    for size, dtype in ((2**15, jnp.int16), (2**15 + 1, jnp.int32)):
        assert HotSet.empty(1, 1, size, 1, 1, jnp.float32).place.dtype == dtype
    request = Request(jnp.zeros((1, 1, 3), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    hot = HotSet.empty(1, 1, 2, 4, 8, jnp.float32)
    with pytest.raises(ValueError, match="hot set of 2"):
        replacement(hot, request, jnp.zeros(1, jnp.int32))


def test_rows_through_a_hot_set_are_the_rows(monkeypatch):
    """The XLA transfer, over several chunks, with ragged counts."""
    monkeypatch.setattr(xla, "CHUNK", 3)
    b, k, t, w, n = 2, 2, 40, 4, 7
    rng = np.random.default_rng(1)
    mesh = default_mesh()
    values = jnp.asarray(rng.normal(size=(b, k, t, w)).astype(np.float32))
    whole = Span.whole(b, t)
    write = jax.jit(lambda host, rows: write_span(host, jnp.int32(1), rows, whole, mesh))
    host = write(allocate_host((2, b, k, t, w), jnp.float32, mesh), values)
    transfer = XlaTransfer()

    @jax.jit
    def move(host: jax.Array, request: Request, rows: jax.Array, made: Replacement) -> tuple:
        return transfer.fetch(host, jnp.int32(1), request, rows, made, mesh)

    hot = HotSet.empty(b, k, 9, w, t, jnp.float32)
    for position in range(6):
        slots = np.stack([rng.permutation(t)[:n] for _ in range(b * k)]).reshape(b, k, n)
        slots = jnp.asarray(np.sort(slots, axis=-1), jnp.int32)
        counts = jnp.asarray(rng.integers(0, n + 1, (b, k)), jnp.int32)
        request = Request(slots, counts)
        hot, made = replaced(hot, request, jnp.full((b,), position, jnp.int32))
        rows, hot_rows = move(host, request, hot.rows, made)
        assert np.isfinite(np.asarray(rows)).all()
        hot = hot._replace(rows=hot_rows)
        valid = np.asarray(request.valid)
        expected = np.take_along_axis(np.asarray(values), np.asarray(slots)[..., None], axis=2)
        np.testing.assert_array_equal(np.asarray(rows)[valid], expected[valid])
