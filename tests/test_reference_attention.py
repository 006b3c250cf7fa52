"""Attention of the reference models: as they are trained, and what is told of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.reference_models import attention, statistics
from infinigen_jax.models.forward import causal_attention


@pytest.mark.parametrize("together", [False, True])
def test_attention_and_its_gradient(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 8)
    keys = jax.random.split(jax.random.key(0), 4)
    q = jax.random.normal(keys[0], (2, 21, 6, 4))
    k, v = (jax.random.normal(key, (2, 21, 3, 4)) for key in keys[1:3])
    aim = jax.random.normal(keys[3], q.shape)

    def gradients(attend: Any) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(attend(q, k, v) * aim)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)

    # float32 sums of 21 terms of size 1, in another order
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        gradients(functools.partial(attention.blocked_attention, together=together)),
        gradients(jax.vmap(causal_attention)),
    )


def test_concentration_of_even_attention() -> None:
    zero = jnp.zeros((1, 400, 2, 4))
    mass = statistics._concentration(zero, zero[:, :, :1])
    np.testing.assert_allclose(mass, np.array([[0.01] * 2, [0.05] * 2, [0.1] * 2]), rtol=0.2)
