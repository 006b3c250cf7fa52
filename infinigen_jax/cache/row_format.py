"""Formats of host cache rows: exact in the model's dtype, or quantised to int8 or int4.

A row is the key and the value of one token in one KV head, concatenated. Quantised it is stored as

    [ codes of K, codes of V | lower, upper bytes of the steps | ... of the lowest values | 0 ]
      int4: K in the lower and                 a step and a lowest value, bfloat16,      to 16
      V in the upper halves                    for each group of columns                 bytes

with groups of at most 64 columns (`ops.quantize.affine_codes`). Each row is decoded independently,
so quantised rows are fetched, written and overwritten like exact ones.

Key columns differ, and some have a mean far from zero. Keys are therefore shifted by the prompt's
mean of each column and divided by a power of two near the square root of its deviation. Values are
quantised unchanged. docs/quantisation.md compares other choices.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from infinigen_jax.errors import ParameterError
from infinigen_jax.ops import quantize
from infinigen_jax.ops.bit_storage import from_kept, kept_dtype, to_kept

LARGEST_GROUP = 64
SMALLEST_GROUP = 32  # unless the head is smaller, or its padding has room for more groups
ALIGNMENT = 16  # bytes that a GPU thread loads in one instruction
PRIOR_TOKENS = 16  # weight of the prior on a column's statistics, in tokens


class Scales(NamedTuple):
    """Shift and scale of keys before quantisation, float32; values have shift 0 and scale 1."""

    centre: Float[Array, "b k w"]  # mean of the prompt's keys, shrunk to 0 for a short prompt
    scale: Float[Array, "b k w"]  # a power of two, so that the division is exact


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Storage format of host rows, usable under jit; see `row_format`."""

    name: str  # "exact", "int8" or "int4"
    dtype: jnp.dtype  # of the model and of decoded rows
    head_dim: int
    as_bits: bool = False  # whether exact two-byte rows are integers, see `ops.bit_storage`

    @property
    def exact(self) -> bool:
        """Whether rows keep the model's dtype."""
        return self.name == "exact"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return {"int8": 8, "int4": 4}[self.name]

    @property
    def storage(self) -> jnp.dtype:
        """Dtype of a stored row."""
        return kept_dtype(self.dtype, self.as_bits) if self.exact else jnp.dtype(jnp.uint8)

    @property
    def width(self) -> int:
        """Elements of a stored row; a multiple of 16 if they are bytes."""
        if self.exact:
            return 2 * self.head_dim
        return _aligned(self.code_bytes + 8 * self.groups)

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes."""
        return 2 * self.head_dim * self.bits // 8

    @property
    def groups(self) -> int:
        """Number of groups of a key, and of a value: as many as fit into the padding.

        0 for a head size that cannot be cut into groups of 32 to 64 columns.
        """
        d = self.head_dim
        sizes = range(min(d, SMALLEST_GROUP), min(d, LARGEST_GROUP) + 1)
        fewest = min((d // size for size in sizes if d % size == 0), default=0)
        if not fewest:
            return 0
        room = _aligned(self.code_bytes + 8 * fewest) - self.code_bytes
        return max(m for m in range(fewest, room // 8 + 1) if d % m == 0)

    def no_scales(self, batch: int, kv_heads: int) -> Any:
        """Return the scales of empty sequences, see `fit`."""
        if self.exact:
            return ()
        ones = jnp.ones((batch, kv_heads, 2 * self.head_dim), jnp.float32)
        return Scales(jnp.zeros_like(ones), ones)

    def fit(self, rows: Float[Array, "b k s w"], lengths: Int[Array, " b"]) -> Any:
        """Return the scales of each sequence from its prompt: Scales, or () for exact rows.

        Rows from `lengths` on are ignored. The square root is a compromise: division by the
        deviation is best if queries are small in the columns where keys are large, no division if
        queries are large there too, as in a skewed basis.
        """
        if self.exact:
            return ()
        d = self.head_dim
        valid = lax.broadcasted_iota(jnp.int32, rows.shape[:3], 2) < lengths[:, None, None]
        # The padding may hold NaN, which a product with 0 would keep.
        keys = jnp.where(valid[..., None], self._rounded(rows)[..., :d], 0)
        tokens = lengths.astype(jnp.float32)[:, None, None] + PRIOR_TOKENS
        centre = jnp.sum(keys, axis=2) / tokens
        deviation = jnp.where(valid[..., None], keys - centre[:, :, None], 0)
        total = jnp.sum(deviation * deviation, axis=2)
        typical = jnp.mean(total, axis=-1, keepdims=True)
        # Deviation relative to the head's mean column; the prior assumes that mean.
        share = lengths.astype(jnp.float32)[:, None, None] / tokens
        relative = jnp.where(typical > 0, total / typical, 1) * share + (1 - share)
        scale = jnp.exp2(jnp.round(jnp.log2(relative) / 4))
        centre, scale = (jnp.where(jnp.isfinite(x), x, o) for x, o in ((centre, 0), (scale, 1)))
        zeros = jnp.zeros_like(centre)
        return Scales(
            jnp.concatenate([centre, zeros], axis=-1), jnp.concatenate([scale, zeros + 1], axis=-1)
        )

    def encode(self, scales: Any, rows: Float[Array, "b k n w"]) -> Array:
        """Return rows in their stored form: [b, k, n, width] of `storage`.

        Equal rows give equal bytes in every program. A NaN or an infinity makes its group NaN.
        """
        if self.exact:
            return to_kept(rows.astype(self.dtype), self.storage)
        x = (self._rounded(rows) - scales.centre[:, :, None]) / scales.scale[:, :, None]
        grouped = x.reshape(*x.shape[:3], 2 * self.groups, -1)
        codes, step, low = quantize.affine_codes(grouped, self.bits)
        codes = codes.reshape(x.shape)
        codes = codes if self.bits == 8 else quantize.pack_halves(codes)
        parts = [codes, *(quantize.to_bytes(x[..., 0]) for x in (step, low))]
        stored = jnp.concatenate(parts, axis=-1)
        return jnp.pad(stored, [(0, 0)] * 3 + [(0, self.width - stored.shape[-1])])

    def decode(self, scales: Any, stored: Array) -> Float[Array, "b k n w"]:
        """Return rows [b, k, n, 2d] in the model's dtype from stored rows.

        Bytes that `encode` did not write decode to arbitrary numbers, including NaN.
        """
        if self.exact:
            return from_kept(stored, self.dtype)
        groups, last = 2 * self.groups, self.code_bytes
        codes = stored[..., :last] if self.bits == 8 else quantize.unpack_halves(stored[..., :last])
        codes = codes.reshape(*codes.shape[:3], groups, -1).astype(jnp.float32)
        step = quantize.from_bytes(stored[..., last : last + 2 * groups])
        low = quantize.from_bytes(stored[..., last + 2 * groups : last + 4 * groups])
        x = codes * step[..., None] + low[..., None]
        x = x.reshape(*x.shape[:3], 2 * self.head_dim)
        return (x * scales.scale[:, :, None] + scales.centre[:, :, None]).astype(self.dtype)

    def _rounded(self, rows: Array) -> Array:
        """Return rows rounded to the model's dtype in float32; XLA may drop a plain conversion."""
        kind = jnp.finfo(self.dtype)
        return lax.reduce_precision(rows.astype(jnp.float32), kind.nexp, kind.nmant)


def row_format(name: str, dtype: Any, head_dim: int, as_bits: bool = False) -> RowFormat:
    """Return the row format of an option, one of `settings.engine.ROW_FORMATS`.

    "auto" keeps rows exact, in the model's dtype.
    """
    kind = "exact" if name == "auto" else name
    result = RowFormat(kind, jnp.dtype(dtype), head_dim, as_bits)
    if not result.exact and not result.groups:
        problem = f"cannot be cut into groups of {SMALLEST_GROUP} to {LARGEST_GROUP}"
        raise ParameterError(
            "rows", f"heads of {head_dim} columns {problem}; use `rows` auto", name
        )
    return result


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
