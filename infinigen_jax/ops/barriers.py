"""When XLA for the CPU computes what: barriers are gone before it fuses and before it decides on
copies, so that it takes conditions and numbers that it cannot know."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

Made = TypeVar("Made")


def apart(compute: Callable[[], Made]) -> Made:
    """The arrays that `compute` returns, computed once and written out, under a condition that
    always holds.

    Fused with its uses it would be computed for each of their elements. A barrier does not help:
    XLA removes those before it fuses for a CPU. For programs of a CPU only; a GPU would ask the
    host for the condition.
    """
    shapes = jax.eval_shape(compute)
    always = lax.optimization_barrier(jnp.bool_(True))  # which XLA must not know
    zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return lax.cond(always, compute, zeros)


def behind(x: Shaped[Array, "*b w"], made: Float[Array, "*b d"]) -> Shaped[Array, "*b w"]:
    """x, when `made` has been computed; w is a multiple of d.

    What is then written in the place of something that `made` was read from needs no copy of it.
    """
    never = jnp.isnan(made) & jnp.isinf(made)
    parts = x.reshape(*made.shape[:-1], -1, made.shape[-1])
    return jnp.where(never[..., None, :], jnp.zeros((), x.dtype), parts).reshape(x.shape)
