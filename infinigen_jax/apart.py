"""Keeping XLA for the CPU from computing a value again wherever it is used."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array


def apart(compute: Callable[[], Array]) -> Array:
    """What `compute` returns, computed once and written out, under a condition that always holds.

    Fused with its uses it would be computed for each of their elements. A barrier does not help:
    XLA removes those before it fuses for a CPU. For programs of a CPU only; a GPU would ask the
    host for the condition.
    """
    shape = jax.eval_shape(compute)
    always = lax.optimization_barrier(jnp.bool_(True))  # which XLA must not know
    return lax.cond(always, compute, lambda: jnp.zeros(shape.shape, shape.dtype))
