"""Numbers of two bytes kept as integers of the same bits, for the CPU.

XLA's CPU backend computes with bfloat16 and float16 in float32, and does so to whatever takes an
array of them, were it only to move a few rows: a gather, a slice or an update in place becomes a
conversion of the whole array, the operation, and a conversion back. Integers are left alone. So
large arrays of such numbers are kept as integers there, and only what is taken out of them or put
into them is reinterpreted. (Reinterpreting a whole array would copy it.)
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped


def kept_dtype(dtype: Any, as_bits: bool) -> jnp.dtype:
    """How numbers of a dtype are kept: as they are, or those of two bytes as uint16."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if as_bits and dtype.itemsize == 2 else dtype


def to_kept(x: Shaped[Array, "*n"], kept: Any) -> Shaped[Array, "*n"]:
    """Numbers as they are kept; those that are kept as numbers are rounded to the dtype."""
    if jnp.issubdtype(kept, jnp.integer):
        return lax.bitcast_convert_type(x, kept)
    return x.astype(kept)


def from_kept(x: Shaped[Array, "*n"], dtype: Any) -> Shaped[Array, "*n"]:
    """Inverse of `to_kept`, for numbers of the dtype."""
    return lax.bitcast_convert_type(x, dtype) if number_dtype(x.dtype, dtype) != x.dtype else x


def number_dtype(kept: Any, dtype: Any) -> jnp.dtype:
    """Of what an array holds: the dtype where it holds such numbers as integers, else its own."""
    kept = jnp.dtype(kept)
    return jnp.dtype(dtype) if kept == jnp.uint16 else kept
