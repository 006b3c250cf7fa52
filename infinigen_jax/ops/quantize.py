"""Integer codes: a group of numbers as small integers, a step and a lowest value.

    x  ~  low + step * code,     code in 0 .. 2^bits - 1

`low` is rounded down and `step` up to bfloat16, so that the codes reach every number of the group
and half a step bounds the error. A bfloat16 times a code of 8 bits is exact in float32: what a
code stands for does not depend on whether the compiler fuses the multiplication and the addition.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt, UInt8

SMALLEST = 2.0**-126  # the smallest normal bfloat16: the step of a group of equal numbers


def affine_codes(
    x: Float[Array, "*b"], bits: int, axis: int = -1
) -> tuple[UInt8[Array, "*b"], Float[Array, "..."], Float[Array, "..."]]:
    """Quantise groups that lie along an axis.

    For magnitudes below 1e38, |low + step * code - x| <= step / 2 (and float32 rounding), with
    step <= (1 + 2^-7) (max - min + 2^-7 |min|) / (2^bits - 1). A group with a NaN, an infinity or
    a larger magnitude comes back as NaN as a whole.

    Args:
        x: float32.
        bits: at most 8.

    Returns:
        codes; step and low, float32 that bfloat16 can hold, of size 1 along the axis.
    """
    top = 2**bits - 1
    low = _floor(jnp.min(x, axis=axis, keepdims=True))
    step = (jnp.max(x, axis=axis, keepdims=True) - low) / top
    # Also NaN where x is: a NaN's bits are not to be rounded.
    step = jnp.where(jnp.isfinite(step), jnp.maximum(_ceil(step), SMALLEST), jnp.nan)
    low = jnp.where(jnp.isfinite(step), low, jnp.nan)
    codes = jnp.clip(jnp.round((x - low) / step), 0, top)
    return jnp.where(jnp.isfinite(codes), codes, 0).astype(jnp.uint8), step, low


def to_bytes(x: Float[Array, "*b n"]) -> UInt8[Array, "*b 2*n"]:
    """Numbers that bfloat16 can hold, as bytes: first all the lower ones, then the upper ones."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    lower, upper = (bits >> 16) & 0xFF, bits >> 24
    return jnp.concatenate([lower, upper], axis=-1).astype(jnp.uint8)


def from_bytes(x: UInt8[Array, "*b m"]) -> Float[Array, "*b m//2"]:
    """Inverse of `to_bytes`, to float32."""
    n = x.shape[-1] // 2
    lower, upper = x[..., :n].astype(jnp.uint32), x[..., n:].astype(jnp.uint32)
    return lax.bitcast_convert_type((lower << 16) | (upper << 24), jnp.float32)


def pack_halves(codes: UInt8[Array, "*b m"]) -> UInt8[Array, "*b m//2"]:
    """4-bit codes in pairs: code i in the lower half of byte i, code n + i in the upper half."""
    n = codes.shape[-1] // 2
    return codes[..., :n] | (codes[..., n:] << 4)


def unpack_halves(packed: UInt8[Array, "*b n"]) -> UInt8[Array, "*b 2*n"]:
    """Inverse of `pack_halves`, one elementwise operation without a concatenation."""
    shifts = jnp.array([0, 4], jnp.uint8).reshape(*(1,) * (packed.ndim - 1), 2, 1)
    halves = (packed[..., None, :] >> shifts) & 0xF
    return halves.reshape(*packed.shape[:-1], -1)


def _floor(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """The next bfloat16 towards minus infinity."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    toward_zero = bits >> 16 << 16
    down = (bits >> 31 == 1) & (bits != toward_zero)
    return _float(jnp.where(down, toward_zero + 0x10000, toward_zero))


def _ceil(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """The next bfloat16 towards infinity, of a number that is not negative."""
    return _float((lax.bitcast_convert_type(x, jnp.uint32) + 0xFFFF) >> 16 << 16)


def _float(bits: UInt[Array, "*b"]) -> Float[Array, "*b"]:
    return lax.bitcast_convert_type(bits, jnp.float32)
