"""Matrix products that are fast on a CPU for a single row."""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

PIECES = 8
PIECE_BYTES = 1 << 19  # bytes of weights; smaller pieces do not repay the sum


def product(a: Float[Array, "*b e"], kernel: Float[Array, "e f"]) -> Float[Array, "*b f"]:
    """Return a @ kernel.

    On a CPU the product of one row and a large float32 matrix is computed as the sum of `pieces`
    products. For a single product XLA gives each thread an equal share and waits for the slowest;
    threads take several products dynamically.
    """
    count = pieces(a, kernel)
    if count == 1:
        return a @ kernel

    def in_pieces(a: Array, kernel: Array) -> Array:
        rows = a.reshape(count, -1)
        parts = jnp.einsum("ne,nef->nf", rows, kernel.reshape(*rows.shape, -1))
        return jnp.sum(parts, axis=0).reshape(*a.shape[:-1], -1)

    return lax.platform_dependent(a, kernel, cpu=in_pieces, default=jnp.matmul)


def pieces(a: Float[Array, "*b e"], kernel: Float[Array, "e f"]) -> int:
    """Return the number of products on a CPU, a power of two; 1 unless one row, in float32."""
    if a.size != len(kernel) or a.dtype != jnp.float32 or kernel.dtype != jnp.float32:
        return 1
    fit = max(1, kernel.size * kernel.dtype.itemsize // PIECE_BYTES)
    return math.gcd(PIECES, len(kernel), 1 << (fit.bit_length() - 1))
