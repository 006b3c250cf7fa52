"""Products with weights, as a CPU is quick at them where a step has one row."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

PIECES = 8
PIECE_BYTES = 1 << 19  # of the weights: smaller ones are not worth the sum


def product(a: Float[Array, "*b e"], kernel: Float[Array, "e f"]) -> Float[Array, "*b f"]:
    """a @ kernel.

    On a CPU one row with a large float32 matrix is as many products of parts of it as `pieces`
    tells, and their sum: XLA hands threads shares of equal size, and the slower one is waited for;
    several products they take as they are done.
    """
    number = pieces(a, kernel)
    if number == 1:
        return a @ kernel

    def in_pieces(a: Array, kernel: Array) -> Array:
        rows = a.reshape(number, -1)
        parts = jnp.einsum("ne,nef->nf", rows, kernel.reshape(*rows.shape, -1))
        return jnp.sum(parts, axis=0).reshape(*a.shape[:-1], -1)

    return lax.platform_dependent(a, kernel, cpu=in_pieces, default=jnp.matmul)


def pieces(a: Float[Array, "*b e"], kernel: Float[Array, "e f"]) -> int:
    """How many products it is on a CPU: a power of two; 1 but for one row and float32 weights."""
    if a.size != len(kernel) or a.dtype != jnp.float32 or kernel.dtype != jnp.float32:
        return 1
    fit = max(1, kernel.size * kernel.dtype.itemsize // PIECE_BYTES)
    return math.gcd(PIECES, len(kernel), 1 << (fit.bit_length() - 1))


def dot_general(a: Array, kernel: Array, dimensions: Any, precision: Any = None, **other) -> Array:
    """`product` where that is what is asked for; for `nnx.Linear`."""
    plain = dimensions == (((a.ndim - 1,), (0,)), ((), ())) and kernel.ndim == 2
    if plain and precision is None and all(x is None for x in other.values()):
        return product(a, kernel)
    return lax.dot_general(a, kernel, dimensions, precision=precision, **other)
