"""Ordering and fusion control for XLA:CPU, which drops `optimization_barrier`.

It drops barriers before it fuses and inserts copies. The functions here use conditions and values
that the compiler cannot simplify.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

Result = TypeVar("Result")


def compute_once(compute: Callable[[], Result]) -> Result:
    """Return the arrays of `compute`, computed once and stored; for CPU programs only.

    It is under a condition that always holds. Without it XLA would fuse `compute` into its
    consumers and repeat it for each element. A GPU would wait for the host to read the condition.
    """
    shapes = jax.eval_shape(compute)
    always = lax.optimization_barrier(jnp.bool_(True))  # opaque to XLA at this stage
    zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.cond(always, compute, zeros)


def after(
    arrays: tuple[Shaped[Array, "*b d"], ...], read: Float[Array, "*b d"]
) -> tuple[Shaped[Array, "*b d"], ...]:
    """Return the arrays, computed after `read`.

    A later write into an array that `read` comes from then needs no copy of it.
    """
    never = jnp.isnan(read) & jnp.isinf(read)
    return tuple(jnp.where(never, jnp.zeros((), x.dtype), x) for x in arrays)
