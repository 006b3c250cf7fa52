"""Storage of two-byte floats as integers with the same bits, for the CPU.

XLA:CPU computes with bfloat16 and float16 in float32. Even a gather, a slice or an in-place update
of a few rows converts the whole array and converts it back. It does not convert integers. Large
arrays are therefore stored as integers, and only the rows read or written are reinterpreted.
(Reinterpreting the whole array would copy it.)
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped


def kept_dtype(dtype: Any, as_bits: bool) -> jnp.dtype:
    """Return the dtype to store an array in: uint16 for two-byte types if `as_bits`."""
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if as_bits and dtype.itemsize == 2 else dtype


def to_kept(x: Shaped[Array, "*n"], kept: Any) -> Shaped[Array, "*n"]:
    """Convert numbers to the storage dtype: reinterpret their bits, or round to a float dtype."""
    if jnp.issubdtype(kept, jnp.integer):
        return lax.bitcast_convert_type(x, kept)
    return x.astype(kept)


def from_kept(x: Shaped[Array, "*n"], dtype: Any) -> Shaped[Array, "*n"]:
    """Convert stored numbers back to a dtype; inverse of `to_kept`."""
    return lax.bitcast_convert_type(x, dtype) if number_dtype(x.dtype, dtype) != x.dtype else x


def number_dtype(kept: Any, dtype: Any) -> jnp.dtype:
    """Return the dtype of the numbers in an array: `dtype` if stored as uint16, else its own."""
    kept = jnp.dtype(kept)
    return jnp.dtype(dtype) if kept == jnp.uint16 else kept
