"""Attention of one token over parts, against dense softmax attention in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infinigen_jax.ops import attention
from infinigen_jax.ops.attention import Part, packed

# Compiled: every operation alone would be.
attend, start_softmax = jax.jit(attention.attend), jax.jit(attention.start_softmax)
finish_softmax = jax.jit(attention.finish_softmax)


@jax.jit
def extend_softmax(state, q, part):
    return attention.join_softmax(state, attention.softmax_over(q, part))


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


def test_parts_that_are_not_valid_may_hold_anything():
    """They belong to another sequence, whose values may be infinite."""
    parts = attention.Softmax(*(normal((1, 2, 3, 2, *d), i) for i, d in enumerate(((), (), (4,)))))
    valid = jnp.asarray([[[True, False, True], [False, False, True]]])
    spoilt = jax.tree.map(
        lambda x: jnp.where(valid.reshape(1, 2, 3, *[1] * (x.ndim - 3)), x, np.inf), parts
    )
    joined = [jax.jit(attention.join_parts)(each, valid) for each in (parts, spoilt)]
    jax.tree.map(np.testing.assert_array_equal, *joined)
    assert all(bool(jnp.isfinite(x).all()) for x in joined[1])
