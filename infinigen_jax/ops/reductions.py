"""Reductions over the tokens of long arrays, vectorised for the CPU.

XLA reduces the last axis one element after the other, because sums of floats depend on the order.
Here pieces of an array are combined elementwise, and XLA reduces only the short result.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

MULTIPLE = 64  # pieces are a multiple of this many tokens
STREAMS = 8  # most pieces; more streams than the hardware prefetcher follows are slower


def summed(term: Callable[..., Array], *arrays: Shaped[Array, "..."]) -> Array:
    """Return the sum of a term over all tokens, on the last axis of the arrays.

    `term` maps one piece of each array, or whole arrays unless they are a multiple of MULTIPLE.
    """

    def in_pieces(*arrays: Array) -> Array:
        terms = _folded(jnp.add, term, *arrays)
        # A product: XLA would fuse another fold with the first and compute it without vectors.
        return jnp.dot(terms, jnp.ones(terms.shape[-1], terms.dtype), precision="highest")

    return lax.platform_dependent(
        *arrays, cpu=in_pieces, default=lambda *arrays: jnp.sum(term(*arrays), axis=-1)
    )


@jax.jit  # traced once for all layers of a step
def best(x: Float[Array, "*b t"]) -> Float[Array, "*b"]:
    """Return the maximum over all tokens."""

    def in_pieces(x: Array) -> Array:
        while _pieces(x.shape[-1]) > 1:
            x = _folded(jnp.maximum, lambda x: x, x)
        return jnp.max(x, axis=-1)

    return lax.platform_dependent(x, cpu=in_pieces, default=lambda x: jnp.max(x, axis=-1))


def _folded(
    combine: Callable[[Array, Array], Array],
    term: Callable[..., Array],
    *arrays: Shaped[Array, "..."],
) -> Array:
    number = _pieces(arrays[0].shape[-1])
    size = arrays[0].shape[-1] // number

    def piece(i: int) -> list[Array]:
        """Return static slices of the arrays, which XLA reads without a copy."""
        return [lax.slice_in_dim(x, i * size, (i + 1) * size, axis=x.ndim - 1) for x in arrays]

    return functools.reduce(combine, (term(*piece(i)) for i in range(number)))


def _pieces(tokens: int) -> int:
    """Return the largest number of equal pieces, each a multiple of MULTIPLE, up to STREAMS."""
    if tokens % MULTIPLE:
        return 1
    groups = tokens // MULTIPLE
    return max(n for n in range(1, STREAMS + 1) if groups % n == 0)
