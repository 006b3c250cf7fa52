"""Reductions over the tokens of long arrays, as a CPU is quick at them.

XLA's own go along the last axis one element after the other, as sums of floats depend on the order.
Here an array is cut into some pieces, and what is left, after all of them have been taken together
side by side, is short.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

LANES = 64  # pieces are of a multiple of so many tokens
# Pieces of what is in the processor's nearest cache: a sum has less to write the more there are.
AT_ONCE = 64
# Of what is not: more streams than the processor reads ahead for are slower.
STREAMS = 8


def summed(term: Callable[..., Array], *arrays: Shaped[Array, "..."]) -> Array:
    """Sum over tokens of a term of each.

    Args:
        term: given a piece of each array, or, where there are no pieces, all of it.
        arrays: the last axis is of tokens, a multiple of LANES.
    """

    def in_pieces(*arrays: Array) -> Array:
        terms = _folded(jnp.add, term, STREAMS, *arrays)
        return jnp.sum(_folded(jnp.add, lambda x: x, AT_ONCE, terms), axis=-1)

    return lax.platform_dependent(
        *arrays, cpu=in_pieces, default=lambda *arrays: jnp.sum(term(*arrays), axis=-1)
    )


@jax.jit  # traced once for all layers of a step
def best(x: Float[Array, "*b t"]) -> Float[Array, "*b"]:
    """The largest over all tokens."""
    return lax.platform_dependent(x, cpu=_best, default=lambda x: jnp.max(x, axis=-1))


def _best(x: Float[Array, "*b t"]) -> Float[Array, "*b"]:
    while not x.shape[-1] % LANES and _pieces(x.shape[-1], STREAMS) > 1:
        x = _folded(jnp.maximum, lambda x: x, STREAMS, x)
    return jnp.max(x, axis=-1)


def _folded(
    combine: Callable[[Array, Array], Array],
    term: Callable[..., Array],
    at_once: int,
    *arrays: Shaped[Array, "..."],
) -> Array:
    number = _pieces(arrays[0].shape[-1], at_once)
    size = arrays[0].shape[-1] // number

    def piece(x: Array, i: int) -> Array:
        """Cut out of the array as it is, so that XLA reads it where it is."""
        return lax.slice_in_dim(x, i * size, (i + 1) * size, axis=x.ndim - 1)

    terms = (term(*(piece(x, i) for x in arrays)) for i in range(number))
    return functools.reduce(combine, terms)


def _pieces(tokens: int, at_most: int) -> int:
    """The largest number of pieces of whole LANES."""
    groups = tokens // LANES
    return max(n for n in range(1, at_most + 1) if groups % n == 0)
