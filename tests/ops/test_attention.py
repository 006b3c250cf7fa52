"""Attention of one token over parts, against dense softmax attention in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infinigen_jax.ops import attention
from infinigen_jax.ops.attention import Part, packed

# Compiled: every operation alone would be.
attend, start_softmax = jax.jit(attention.attend), jax.jit(attention.start_softmax)
extend_softmax, finish_softmax = map(jax.jit, (attention.extend_softmax, attention.finish_softmax))

TOLERANCE = 2e-6  # float32, sums over at most some hundred terms of size 1


def normal(shape, seed: int, scale: float = 1.0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(scale=scale, size=shape).astype(np.float32))


def dense(q, keys, values, valid) -> np.ndarray:
    """One token's attention in float64: q [b, k, g, d], keys [b, k, n, d], valid [b, k, n]."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    scores = np.einsum("bkgd,bknd->bkgn", q, keys)
    scores = np.where(np.asarray(valid)[:, :, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bkgn,bknd->bkgd", weights, values)


def random_part(n: int, seed: int, share: float = 0.6, b: int = 2, k: int = 2, d: int = 8) -> Part:
    valid = np.random.default_rng(seed).random((b, k, n)) < share
    keys, values = normal((b, k, n, d), seed + 1, 2.0), normal((b, k, n, d), seed + 2)
    return Part(keys, values, jnp.asarray(valid))


def joined(parts: list[Part]) -> tuple:
    """The parts as one: keys, values, valid."""
    shape = parts[0].keys.shape[:2]
    wide = [jnp.broadcast_to(p.valid, (*shape, p.keys.shape[2])) for p in parts]
    keys, values = ([getattr(p, name) for p in parts] for name in ("keys", "values"))
    return tuple(jnp.concatenate(x, axis=2) for x in (keys, values, wide))


def test_literal_case():
    """Cached logits 2 and 0, current 1, values 1, 2, 3; alpha 2 fetches the first only."""
    q = jnp.ones((1, 1, 1, 1))
    current = Part(
        jnp.full((1, 1, 1, 1), 1.0), jnp.full((1, 1, 1, 1), 3.0), jnp.ones((1, 1, 1), bool)
    )
    keys, values = jnp.array([[[[2.0], [0.0]]]]), jnp.array([[[[1.0], [2.0]]]])
    both = attend(q, current, Part(keys, values, jnp.array([[[True, True]]])))
    first = attend(q, current, Part(keys, values, jnp.array([[[True, False]]])))
    np.testing.assert_allclose(both, [[[[1.5795]]]], atol=5e-5)
    np.testing.assert_allclose(first, [[[[1.5379]]]], atol=5e-5)
    dropped = np.exp(-2) * 0.6652
    assert abs(float(both[0, 0, 0, 0] - first[0, 0, 0, 0])) <= 2 * dropped * 3


def test_nothing_fetched_gives_the_value_of_the_current_token():
    q = normal((2, 2, 3, 8), 0)
    current = random_part(1, 1, share=2.0)
    nothing = random_part(5, 2, share=-1.0)
    expected = jnp.broadcast_to(current.values, q.shape)
    np.testing.assert_allclose(attend(q, current, nothing), expected, atol=TOLERANCE)


@pytest.mark.parametrize("sizes", [(1,), (3, 5), (7, 1, 4)])
@pytest.mark.parametrize("group", [1, 3])
def test_parts_are_attended_as_one_cache(sizes, group):
    q = normal((2, 2, group, 8), 3)
    parts = [random_part(n, 10 * n, share=2.0 if i == 0 else 0.6) for i, n in enumerate(sizes)]
    reference = dense(q, *joined(parts))
    np.testing.assert_allclose(attend(q, *parts), reference, atol=TOLERANCE)
    state = start_softmax(q)
    for part in parts:
        state = extend_softmax(state, q, part)
    np.testing.assert_allclose(finish_softmax(state, q), reference, atol=TOLERANCE)
    state = start_softmax(q)
    for part in reversed(parts):  # masked blocks may come first
        state = extend_softmax(state, q, part)
    np.testing.assert_allclose(finish_softmax(state, q), reference, atol=TOLERANCE)


def test_masked_rows_and_parts_never_matter():
    q = normal((2, 2, 2, 8), 4)
    part, masked = random_part(6, 5, share=2.0), random_part(9, 6, share=-1.0)
    huge = masked._replace(keys=masked.keys * 1e6, values=masked.values * 1e6)
    alone = attend(q, part)
    for other in (masked, huge):
        np.testing.assert_array_equal(attend(q, part, other), alone)
        before = extend_softmax(extend_softmax(start_softmax(q), q, other), q, part)
        after = extend_softmax(extend_softmax(start_softmax(q), q, part), q, other)
        for state in (before, after):
            np.testing.assert_allclose(finish_softmax(state, q), alone, atol=TOLERANCE)


def test_order_of_cached_tokens_does_not_matter():
    q, part = normal((2, 2, 2, 8), 7), random_part(11, 8)
    order = np.random.default_rng(0).permutation(11)
    shuffled = Part(part.keys[:, :, order], part.values[:, :, order], part.valid[:, :, order])
    current = random_part(1, 9, share=2.0)
    np.testing.assert_allclose(
        attend(q, current, part), attend(q, current, shuffled), atol=TOLERANCE
    )


def test_query_heads_read_the_kv_head_of_their_group():
    """Changing KV head 1 changes the outputs of its group and no other's."""
    q, part = normal((1, 3, 2, 8), 11), random_part(5, 12, share=2.0, b=1, k=3)
    changed = part._replace(values=part.values.at[:, 1].add(1.0))
    difference = np.abs(np.asarray(attend(q, changed) - attend(q, part))).max(axis=(0, 2, 3))
    np.testing.assert_allclose(difference, [0, 1, 0], atol=TOLERANCE)


def test_long_parts_are_summed_alike():
    """4096 values and more take another path."""
    q, current = normal((1, 2, 2, 8), 13), random_part(1, 14, share=2.0, b=1)
    for n in (4096, 4100):
        part = random_part(n, 15, b=1)
        got = attend(q, current, part)
        np.testing.assert_allclose(got, dense(q, *joined([current, part])), atol=1e-5)


def test_extreme_scores():
    q = jnp.full((1, 1, 1, 2), 100.0)
    keys = jnp.array([[[[1e4, 0.0], [-1e4, 0.0], [1e4, 0.0]]]])
    part = Part(keys, jnp.array([[[[1.0, 0], [5.0, 0], [3.0, 0]]]]), jnp.ones((1, 1, 3), bool))
    online = finish_softmax(extend_softmax(start_softmax(q), q, part), q)
    for output in (attend(q, part), online):
        np.testing.assert_allclose(output, [[[[2.0, 0.0]]]], atol=TOLERANCE)


def test_half_precision_keeps_its_type_and_a_float32_softmax():
    q = normal((2, 2, 2, 8), 16)
    part = random_part(50, 17, share=2.0)
    half = Part(part.keys.astype(jnp.bfloat16), part.values.astype(jnp.bfloat16), part.valid)
    output = attend(q.astype(jnp.bfloat16), half)
    assert output.dtype == jnp.bfloat16
    reference = dense(q.astype(jnp.bfloat16), half.keys, half.values, half.valid)
    # The rounding of the weights and of the output, relative 2^-9 each, of values up to about 3.
    np.testing.assert_allclose(output.astype(jnp.float32), reference, atol=3 * 2**-8)


@pytest.mark.parametrize("n", [7, 4096])
def test_packed_rows_are_attended_as_if_taken_apart(n):
    q, part = normal((2, 2, 2, 8), 21), random_part(n, 22)
    together = packed(jnp.concatenate([part.keys, part.values], -1), part.valid)
    current = random_part(1, 23, share=2.0)
    apart = attend(q, current, part)
    np.testing.assert_allclose(attend(q, current, together), apart, atol=TOLERANCE)
    state = extend_softmax(extend_softmax(start_softmax(q), q, together), q, current)
    np.testing.assert_allclose(finish_softmax(state, q), apart, atol=TOLERANCE)


@pytest.mark.parametrize("true_alpha", [0.5, 2.0])
def test_what_is_dropped_is_bounded(true_alpha):
    """With true scores and no cap: dropped mass <= (n - k) e^-alpha w_max, error <= 2 m |v|."""
    q = normal((2, 2, 1, 8), 18)
    part, current = random_part(60, 19, share=2.0), random_part(1, 20, share=2.0)
    scores = np.einsum("bkgd,bknd->bkgn", q, part.keys)[:, :, 0]
    fetched = scores > scores.max(-1, keepdims=True) - true_alpha
    assert fetched.any(-1).all() and not fetched.all()
    full = attend(q, current, part)
    sparse = attend(q, current, part._replace(valid=jnp.asarray(fetched)))
    own = np.einsum("bkgd,bknd->bkgn", q, current.keys)[:, :, 0]
    weights = np.exp(np.concatenate([own, scores], -1).astype(np.float64))
    weights = (weights / weights.sum(-1, keepdims=True))[..., 1:]
    dropped = (weights * ~fetched).sum(-1)
    assert (dropped <= (~fetched).sum(-1) * np.exp(-true_alpha) * weights.max(-1) + 1e-12).all()
    # |v| of every token that takes part, by head; the error is a vector, hence its norm.
    norms = np.linalg.norm(np.concatenate([current.values, part.values], 2), axis=-1).max(-1)
    error = np.linalg.norm(np.asarray(full - sparse)[:, :, 0], axis=-1)
    assert (error <= 2 * dropped * norms + 1e-6).all()
