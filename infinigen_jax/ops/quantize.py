"""Quantisation of groups of numbers to small integer codes, a step and a lowest value.

    x  ~  low + step * code,     code in 0 .. 2^bits - 1

`low` is rounded down and `step` up to bfloat16, so that the codes cover every number of the group
and half a step bounds the error. A bfloat16 times an 8-bit code is exact in float32. The decoded
value therefore does not depend on whether the compiler fuses multiplication and addition.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt, UInt8

SMALLEST = 2.0**-126  # the smallest normal bfloat16: the step of a group of equal numbers


def affine_codes(
    x: Float[Array, "*b"], bits: int, axis: int = -1
) -> tuple[UInt8[Array, "*b"], Float[Array, "..."], Float[Array, "..."]]:
    """Quantise groups of float32 numbers along an axis; `bits` is at most 8.

    For magnitudes below 1e38, |low + step * code - x| <= step / 2 (and float32 rounding), with
    step <= (1 + 2^-7) (max - min + 2^-7 |min|) / (2^bits - 1). A group with a NaN, an infinity or
    a larger magnitude decodes to NaN as a whole. Return codes, and step and low, float32 that
    bfloat16 can hold, of size 1 along the axis.
    """
    top = 2**bits - 1
    low = _floor(jnp.min(x, axis=axis, keepdims=True))
    step = (jnp.max(x, axis=axis, keepdims=True) - low) / top
    # NaN where x has one: a NaN's bits must not be rounded.
    step = jnp.where(jnp.isfinite(step), jnp.maximum(_ceil(step), SMALLEST), jnp.nan)
    low = jnp.where(jnp.isfinite(step), low, jnp.nan)
    codes = jnp.clip(jnp.round((x - low) / step), 0, top)
    return jnp.where(jnp.isfinite(codes), codes, 0).astype(jnp.uint8), step, low


def to_bytes(x: Float[Array, "*b n"]) -> UInt8[Array, "*b 2*n"]:
    """Return numbers that bfloat16 can hold as bytes: all lower bytes, then all upper bytes."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    lower, upper = (bits >> 16) & 0xFF, bits >> 24
    return jnp.concatenate([lower, upper], axis=-1).astype(jnp.uint8)


def from_bytes(x: UInt8[Array, "*b m"]) -> Float[Array, "*b m//2"]:
    """Return float32 numbers from bytes; inverse of `to_bytes`."""
    n = x.shape[-1] // 2
    lower, upper = x[..., :n].astype(jnp.uint32), x[..., n:].astype(jnp.uint32)
    return lax.bitcast_convert_type((lower << 16) | (upper << 24), jnp.float32)


def pack_halves(codes: UInt8[Array, "*b m"]) -> UInt8[Array, "*b m//2"]:
    """Pack 4-bit codes in pairs: code i in the lower half of byte i, n + i in the upper half."""
    n = codes.shape[-1] // 2
    return codes[..., :n] | (codes[..., n:] << 4)


def unpack_halves(packed: UInt8[Array, "*b n"]) -> UInt8[Array, "*b 2*n"]:
    """Unpack the codes of `pack_halves`, in one elementwise operation without a concatenation."""
    shifts = jnp.array([0, 4], jnp.uint8).reshape(*(1,) * (packed.ndim - 1), 2, 1)
    halves = (packed[..., None, :] >> shifts) & 0xF
    return halves.reshape(*packed.shape[:-1], -1)


def _floor(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Round down to bfloat16."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    toward_zero = bits >> 16 << 16
    down = (bits >> 31 == 1) & (bits != toward_zero)
    return _float(jnp.where(down, toward_zero + 0x10000, toward_zero))


def _ceil(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Round up to bfloat16; x is not negative."""
    return _float((lax.bitcast_convert_type(x, jnp.uint32) + 0xFFFF) >> 16 << 16)


def _float(bits: UInt[Array, "*b"]) -> Float[Array, "*b"]:
    return lax.bitcast_convert_type(bits, jnp.float32)
