"""Attention of one token over parts, against dense softmax attention in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

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


def dense(q, parts: list[Part]) -> np.ndarray:
    """One token's attention to all parts together in float64."""
    scores, values = [], []
    for part in parts:
        keys = np.asarray(part.keys, np.float64)
        score = np.einsum("bkgd,bknd->bkgn", np.asarray(q, np.float64), keys)
        scores.append(np.where(np.asarray(part.valid)[:, :, None], score, -np.inf))
        values.append(np.asarray(part.values, np.float64))
    scores = np.concatenate(scores, axis=-1)
    weights = softmax(scores, axis=-1)
    return np.einsum("bkgn,bknd->bkgd", weights, np.concatenate(values, axis=2))


def random_part(n: int, seed: int, share: float = 0.6, b: int = 2, k: int = 2, d: int = 8) -> Part:
    valid = np.random.default_rng(seed).random((b, k, n)) < share
    keys, values = normal((b, k, n, d), seed + 1, 2.0), normal((b, k, n, d), seed + 2)
    return Part(keys, values, jnp.asarray(valid))


def joined(q, *parts: Part):
    """Attention to one part after the other."""
    state = start_softmax(q)
    for part in parts:
        state = extend_softmax(state, q, part)
    return finish_softmax(state, q)


@pytest.mark.parametrize(
    "sizes, group", [((1,), 3), ((3, 5), 1), ((7, 1, 4), 3), ((1, 4096), 1), ((1, 4100), 3)]
)
def test_parts_are_attended_as_one_cache(sizes, group):
    """Rows may be packed, masked parts may come first, and 4096 values take another path."""
    q = normal((2, 2, group, 8), 3)
    parts = [random_part(n, 10 * n, share=2.0 if i == 0 else 0.6) for i, n in enumerate(sizes)]
    rows = [packed(jnp.concatenate([p.keys, p.values], -1), p.valid) for p in parts]
    tolerance = 1e-5 if sum(sizes) > 4096 else TOLERANCE
    for output in (joined(q, *parts), joined(q, *rows), joined(q, *rows[::-1])):
        np.testing.assert_allclose(output, dense(q, parts), atol=tolerance)


def test_masked_rows_and_parts_never_matter():
    q = normal((2, 2, 2, 8), 4)
    part, masked = random_part(6, 5, share=2.0), random_part(9, 6, share=-1.0)
    huge = masked._replace(keys=masked.keys * 1e6, values=masked.values * 1e6)
    alone = attend(q, part)
    for other in (masked, huge):
        for parts in ((other, part), (part, other)):
            np.testing.assert_allclose(joined(q, *parts), alone, atol=TOLERANCE)


def test_extreme_scores():
    q = jnp.full((1, 1, 1, 2), 100.0)
    keys = jnp.array([[[[1e4, 0.0], [-1e4, 0.0], [1e4, 0.0]]]])
    part = Part(keys, jnp.array([[[[1.0, 0], [5.0, 0], [3.0, 0]]]]), jnp.ones((1, 1, 3), bool))
    for output in (attend(q, part), joined(q, part)):
        np.testing.assert_allclose(output, [[[[2.0, 0.0]]]], atol=TOLERANCE)


def test_half_precision_keeps_its_type_and_a_float32_softmax():
    q = normal((2, 2, 2, 8), 16).astype(jnp.bfloat16)
    part = random_part(50, 17, share=2.0)
    half = Part(part.keys.astype(jnp.bfloat16), part.values.astype(jnp.bfloat16), part.valid)
    output = attend(q, half)
    assert output.dtype == jnp.bfloat16
    # The rounding of the weights and of the output, relative 2^-9 each, of values up to about 3.
    np.testing.assert_allclose(output.astype(jnp.float32), dense(q, [half]), atol=3 * 2**-8)


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
