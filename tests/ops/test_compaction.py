"""From marks to the marked places."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infinigen_jax.ops.compaction import compact, compact_by_row, marked, pack_marks, unpack_marks

compiled_compact = jax.jit(compact, static_argnames="size")


@partial(jax.jit, static_argnums=1)
def compiled_by_row(mask, size):
    words = pack_marks(mask.reshape(-1, mask.shape[-1]))
    return compact_by_row(words, size)


def check_compact(got, mask):
    got, mask = np.asarray(got).reshape(-1, got.shape[-1]), mask.reshape(-1, mask.shape[-1])
    for places, row in zip(got, mask, strict=True):
        marked = np.flatnonzero(row)[: len(places)]
        assert places.tolist() == [*marked, *[0] * (len(places) - len(marked))]


@given(st.sampled_from([31, 1100, 4100]), st.integers(0, 2**32 - 1))
@example(1100, 0)
def test_compact_lists_the_marked_positions(t, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((2, 2, t)) < rng.choice([0.0, 0.1, 0.9, 1.0], size=(2, 2, 1))
    got = compiled_compact(jnp.asarray(mask), size=t)
    check_compact(got, mask)
    # As where loops of unknown length cost more.
    check_compact(compiled_by_row(jnp.asarray(mask), t), mask)


@pytest.mark.parametrize(("t", "size"), [(40, 3), (900, 150), (900, 128)])
def test_compact_into_fewer_places_than_there_are_marks(t, size):
    mask = np.random.default_rng(size).random((2, 2, t)) < 0.9
    check_compact(compiled_compact(jnp.asarray(mask), size=size), mask)
    check_compact(compiled_by_row(jnp.asarray(mask), size), mask)


@jax.jit
def words_of(mask):
    words = pack_marks(mask)
    return words, unpack_marks(words, mask.shape[-1]), marked(words)


@given(st.sampled_from([1, 32, 100, 640]), st.integers(0, 2**32 - 1))
def test_words_have_the_marks(t, seed):
    mask = np.random.default_rng(seed).random((2, t)) < 0.5
    words, unpacked, count = words_of(jnp.asarray(mask))
    bits = (np.asarray(words)[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    bits = bits.reshape(2, -1)
    assert (bits[:, :t] == mask).all() and not bits[:, t:].any()
    assert (np.asarray(unpacked) == mask).all() and count.tolist() == mask.sum(axis=1).tolist()
