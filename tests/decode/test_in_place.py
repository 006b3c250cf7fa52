"""Attention to rows where the host keeps them: slots by list and by marks."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from infinigen_jax.decode import requested_attention as in_place
from infinigen_jax.ops.attention import attend, finish_softmax, packed
from infinigen_jax.ops.compaction import pack_marks
from infinigen_jax.selection.select import Request

B, K, G, D, T = 3, 4, 2, 8, 700
SIZE = 400  # places of a request: up to seven jobs of a head, the last one not whole


@jax.jit
def both(q, rows, request):
    def read(head, place, slots):
        return rows.reshape(B * K, T, 2 * D)[head[:, None], slots][None]

    listed, sums = in_place.attend_requested(q, request._replace(marks=None), read, sums=True)
    by_marks, again = in_place.attend_requested(
        q, request._replace(slots=jnp.full_like(request.slots, -1)), read, sums=True
    )
    return (finish_softmax(listed, q), sums), (finish_softmax(by_marks, q), again), listed


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_slots_by_list_and_by_marks(seed):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((B, K, G, D)).astype(np.float32)
    rows = rng.standard_normal((B, K, T, 2 * D)).astype(np.float32)
    # About as many jobs as a loop takes: one loop, or two.
    count = rng.integers(1, SIZE + 1, (B, K)) * (rng.random((B, K)) < 0.8).astype(np.int32)
    mask = np.zeros((B, K, T), bool)
    slots = np.zeros((B, K, SIZE), np.int32)
    for i, j in np.ndindex(B, K):
        slots[i, j, : count[i, j]] = np.sort(rng.permutation(T)[: count[i, j]])
        mask[i, j, slots[i, j, : count[i, j]]] = True
    marks = pack_marks(jnp.asarray(mask))
    request = Request(jnp.asarray(slots), jnp.asarray(count), marks=marks)
    (listed, sums), (by_marks, again), softmax = both(jnp.asarray(q), jnp.asarray(rows), request)
    np.testing.assert_array_equal(listed, by_marks)
    np.testing.assert_array_equal(sums, again)
    expected = attend(jnp.asarray(q), packed(jnp.asarray(rows), jnp.asarray(mask)))
    some = count > 0
    np.testing.assert_allclose(listed[some], expected[some], rtol=1e-5, atol=1e-5)
    assert (np.asarray(softmax.total)[~some] == 0).all()
    np.testing.assert_allclose(sums, (rows[..., D:] * mask[..., None]).sum(2), rtol=1e-4, atol=1e-4)
