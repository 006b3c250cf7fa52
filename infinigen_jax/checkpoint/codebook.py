"""Matrices whose codes of 4 bits number the values of a codebook, read as float32 matrices.

    compressed-tensors  weight_packed [f, e / 2], weight_scale [f, g]; NVFP4: weight_global_scale
    ModelOpt (NVFP4)    weight [f, e / 2], weight_scale [f, g], weight_scale_2
    bitsandbytes        weight [f e / 2, 1], weight.absmax [n], weight.quant_map [16] and
                        weight.quant_state.bitsandbytes__nf4 or __fp4, bytes of JSON

A matrix has f outputs and e inputs. A byte holds two codes, the first in its low bits, or in its
high bits in bitsandbytes. A weight is its value in the codebook times the scale of its block. There
are g blocks of inputs for each output; bitsandbytes has n blocks of the matrix, row after row.

NVFP4 divides all scales by its global scale, or multiplies them by its second scale. MXFP4's scales
are exponents of two, plus 127. bitsandbytes may hold scales as codes of 8 bits: then a scale is an
offset plus a value in nested_quant_map [256] times its block's number in nested_absmax.
"""

import json
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from infinigen_jax.checkpoint.tensor_source import TensorSource, is_float, refusal_of

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # 4 bits, of which the first is a sign
BIAS = 127  # of MXFP4's exponents
LARGEST_BLOCK = 4096  # codes, in bitsandbytes
LARGEST_STATE = 4096  # bytes of its JSON
AT_ONCE = 2**22  # numbers computed at a time, to bound the temporaries
BITSANDBYTES = (
    *("", ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map"),
    *(".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"),
)  # endings of the names of a matrix's parts


class _Coded(NamedTuple):
    """A matrix in blocks of an even number of codes, row after row; the last may be shorter."""

    shape: tuple[int, int]
    codes: TensorSource
    pairs: Callable[[], Float32[np.ndarray, "256 2"]]  # the two values in each byte
    scales: Callable[[], Float32[np.ndarray, " n"]]
    block: int

    def source(self, name: str) -> TensorSource:
        float32, release = np.dtype(np.float32), self.codes.release
        return TensorSource(name, self.codes.file, self.shape, float32, self.read, release, 4)

    def read(self) -> Float32[np.ndarray, "f e"]:
        """Return the matrix."""
        codes = self.codes.read().reshape(-1).view(np.uint8)
        with np.errstate(all="ignore"):  # damaged scales; the caller checks that values are finite
            scales, pairs = self.scales(), self.pairs()
            blocks = np.zeros((len(scales), self.block), np.float32)
            step = AT_ONCE // self.block + 1
            for start in range(0, len(blocks), step):
                part = blocks[start : start + step]
                values = pairs[codes[start * self.block // 2 :][: part.size // 2]]
                part.reshape(-1)[: values.size] = values.reshape(-1)
                part *= scales[start : start + step, None]
        return blocks.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)


def float4(
    name: str,
    codes: TensorSource | None,
    scale: TensorSource | None,
    global_scale: TensorSource | None,
    combine: np.ufunc,
) -> TensorSource:
    """Return a matrix in NVFP4, whose scales `global_scale` changes, or in MXFP4, without one."""
    refusal = refusal_of(codes, scale, global_scale)
    if codes is None or scale is None or any(len(x.shape) != 2 for x in (codes, scale)):
        raise refusal
    exponents = scale.dtype == np.uint8
    outputs, inputs, groups = codes.shape[0], 2 * codes.shape[1], scale.shape[1]
    fits = [
        codes.dtype == np.uint8,
        scale.shape[0] == outputs and groups > 0 and codes.shape[1] % groups == 0,
        exponents or is_float(scale),
        exponents == (global_scale is None),
        global_scale is None or math.prod(global_scale.shape) == 1 and is_float(global_scale),
    ]
    if not all(fits):
        raise refusal

    def scales() -> Float32[np.ndarray, " n"]:
        values = scale.read().reshape(-1).astype(np.float32)
        if global_scale is None:
            return np.exp2(values - BIAS)
        return combine(values, global_scale.read().reshape(-1).astype(np.float32))

    def pairs() -> Float32[np.ndarray, "256 2"]:
        return _pairs(np.concatenate([E2M1, -E2M1]))

    return _Coded((outputs, inputs), codes, pairs, scales, inputs // groups).source(name)


def bitsandbytes(name: str, *parts: TensorSource | None) -> TensorSource:
    """Return a matrix of bitsandbytes in 4 bits; `parts` are in the order of BITSANDBYTES.

    Its state is read, for the shape.
    """
    codes, scale, book, nested, nested_book, nf4, fp4 = parts
    refusal, state = refusal_of(*parts), nf4 or fp4
    if codes is None or scale is None or book is None or state is None:
        raise refusal
    if state.dtype != np.uint8 or math.prod(state.shape) > LARGEST_STATE:
        raise refusal
    try:
        given = json.loads(state.read().tobytes())
        outputs, inputs = (int(size) for size in given["shape"])
        block = int(given["blocksize"])
        outer, offset = int(given.get("nested_blocksize", 1)), float(given.get("nested_offset", 0))
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        raise refusal from None
    numbers = outputs * inputs
    if min(outputs, inputs, block, outer) < 1 or block % 2 or block > LARGEST_BLOCK:
        raise refusal
    count = -(-numbers // block)
    fits = [
        math.prod(codes.shape) * codes.dtype.itemsize == -(-numbers // 2),  # bytes, in any dtype
        scale.shape == (count,) and (scale.dtype == np.uint8 or is_float(scale)),
        book.shape == (16,) and is_float(book) and math.isfinite(offset),
        (nested is None) == (nested_book is None) == (scale.dtype != np.uint8),
        nested is None or nested.shape == (-(-count // outer),) and is_float(nested),
        nested_book is None or nested_book.shape == (256,) and is_float(nested_book),
    ]
    if not all(fits):
        raise refusal

    def scales() -> Float32[np.ndarray, " n"]:
        if nested is None or nested_book is None:
            return scale.read().astype(np.float32)
        factors = nested.read().astype(np.float32)[np.arange(count) // min(outer, count)]
        return nested_book.read().astype(np.float32)[scale.read()] * factors + np.float32(offset)

    def pairs() -> Float32[np.ndarray, "256 2"]:
        return _pairs(book.read().astype(np.float32))[:, ::-1]

    return _Coded((outputs, inputs), codes, pairs, scales, block).source(name)


def _pairs(book: Float32[np.ndarray, " 16"]) -> Float32[np.ndarray, "256 2"]:
    """Return the two values in each byte, first that of the low bits."""
    byte = np.arange(256)
    return book[np.stack([byte & 15, byte >> 4], axis=1)]
