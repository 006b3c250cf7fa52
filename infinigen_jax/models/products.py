"""Matrix products that are fast on a CPU for few rows.

Matrices are stored by output, [f, e], as in the files. A product with few rows takes as long as
reading the matrix, and reading is fast along its rows.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

FEW_ROWS = 64  # with more, computing takes longer than reading
WRITTEN_OUT = 2  # rows up to which an unrolled sum is faster than the library
VECTOR = 16  # numbers in a vector
# Terms of that sum: with fewer, adding up the vectors takes longer than reading; more take long to
# compile.
FEWEST_TERMS, MOST_TERMS = 16, 48


def product(
    a: Float[Array, "*b e"], weight: Float[Array, "f e"], dtype: Any = None
) -> Float[Array, "*b f"]:
    """Return a @ weight.T in `dtype`, by default that of `a`."""

    def plain(a: Array, weight: Array) -> Array:
        return jnp.matmul(a, weight.T, preferred_element_type=dtype)

    rows, inputs = math.prod(a.shape[:-1]), a.shape[-1]
    if not 0 < rows <= FEW_ROWS or not a.dtype == weight.dtype == jnp.float32:
        return plain(a, weight)
    vectors = inputs // VECTOR if inputs % VECTOR == 0 else 1
    written_out = rows <= WRITTEN_OUT and most_terms(vectors) >= FEWEST_TERMS
    few = _written_out if written_out else _few_rows
    return lax.platform_dependent(a, weight, cpu=few, default=plain)


def _few_rows(a: Float[Array, "*b e"], weight: Float[Array, "f e"]) -> Float[Array, "*b f"]:
    """Multiply with the weight on the left, because the library reads along its rows."""
    turned = lax.dot_general(weight, a.reshape(-1, a.shape[-1]), (((1,), (1,)), ((), ())))
    # Without the barrier XLA would exchange the operands and leave the transposition out.
    return lax.optimization_barrier(turned).T.reshape(*a.shape[:-1], -1)


@jax.jit
def _written_out(a: Float[Array, "*b e"], weight: Float[Array, "f e"]) -> Float[Array, "*b f"]:
    """Multiply vectors of VECTOR numbers and add them, which XLA compiles to one loop."""
    terms = most_terms(weight.shape[1] // VECTOR)
    x = a.reshape(math.prod(a.shape[:-1]), 1, -1, terms, VECTOR)
    vectors = weight.reshape(1, len(weight), -1, terms, VECTOR)
    total = x[:, :, :, 0] * vectors[:, :, :, 0]
    for i in range(1, terms):
        total = total + x[:, :, :, i] * vectors[:, :, :, i]
    return jnp.sum(total, axis=(2, 3)).reshape(*a.shape[:-1], -1)


def most_terms(count: int) -> int:
    """Return how many of `count` terms are written out at a time: a divisor of their number."""
    return max(n for n in range(1, MOST_TERMS + 1) if count % n == 0)
