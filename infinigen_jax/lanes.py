"""Reductions over the tokens of long arrays, for a CPU.

XLA's own go along the last axis one element after the other, as sums of floats depend on the order.
Here an array is cut into up to AT_ONCE pieces, and what is left, after all of them have been taken
together side by side, is short.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

LANES = 128  # pieces are of a multiple of so many tokens
AT_ONCE = 64


def summed(term: Callable[..., Array], *arrays: Shaped[Array, "..."]) -> Array:
    """Sum over tokens of a term of each.

    Args:
        term: given a piece of each array.
        arrays: the last axis is of tokens, a multiple of LANES.
    """
    return jnp.sum(_folded(jnp.add, term, *arrays), axis=-1)


@jax.jit  # traced once for all layers of a step
def best(x: Float[Array, "*b t"]) -> Float[Array, "*b"]:
    """The largest over all tokens."""
    if x.shape[-1] % LANES:
        return jnp.max(x, axis=-1)
    return jnp.max(_folded(jnp.maximum, lambda x: x, x), axis=-1)


def _folded(
    combine: Callable[[Array, Array], Array],
    term: Callable[..., Array],
    *arrays: Shaped[Array, "..."],
) -> Array:
    groups = arrays[0].shape[-1] // LANES
    number = max(n for n in range(1, AT_ONCE + 1) if groups % n == 0)
    pieces = [x.reshape(*x.shape[:-1], number, -1) for x in arrays]
    terms = (term(*(x[..., i, :] for x in pieces)) for i in range(number))
    return functools.reduce(combine, terms)
