"""Quantised matrices of Hugging Face folders, read as the float32 matrices that they stand for.

    FP8, int8           weight [f, e], and weight_scale or weight_scale_inv: one number, one per
                        row, or one per block, whose height and width are powers of two
    compressed-tensors  weight_packed [f, e / n], weight_scale [f, g], weight_shape [2],
                        perhaps weight_zero_point [f / n, g] and weight_g_idx [e]
    GPTQ                qweight [e / n, f], scales [g, f], qzeros [g, f / n], perhaps g_idx [e]
    AWQ                 qweight [e, f / n], scales [g, f], qzeros [g, f / n]
    bitsandbytes, int8  weight [f, e], SCB [f]: scales times 127

A matrix has f outputs and e inputs, in g groups: of equal size, or as g_idx says. A word of 32 bits
holds n codes of 4 or 8 bits, the lowest bits first, and a weight is scale * (code - zero). GPTQ
stores zeros less one. AWQ's words hold eight neighbours in the order 0, 2, 4, 6, 1, 3, 5, 7.
`codebook` has further formats.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int, UInt8

from infinigen_jax.checkpoint.codebook import AT_ONCE, BITSANDBYTES, bitsandbytes, float4
from infinigen_jax.checkpoint.safetensors import DTYPES
from infinigen_jax.checkpoint.tensor_source import TensorSource, is_float, refusal_of
from infinigen_jax.errors import InputError, UnsupportedModelError
from infinigen_jax.models.hf import refuse_unless
from infinigen_jax.numeric import listed

# Formats, by their names in config.json.
QUANTISED = (
    *("fp8", "fbgemm_fp8", "float-quantized", "int-quantized", "naive-quantized"),
    *("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "nvfp4"),
    *("gptq", "awq", "bitsandbytes"),
)
LAYOUTS = {"gptq": "gptq", "awq": "gemm"}  # those that are read, of several
# Endings of the names of scales: of a quantised matrix, and of what this package does not quantise.
SCALES = (".weight_scale", ".weight_scale_inv")
OTHER_SCALES = (
    *(".input_scale", ".activation_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale"),
    *(".input_zero_point", ".input_global_scale"),
)
COMPRESSED = ".weight_packed"
FP8 = DTYPES["F8_E4M3"]
WORD = 32  # bits
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of neighbours in a word


def check_quantisation(settings: Any) -> None:
    """Refuse a `quantization_config` of weights that this module does not read."""
    if not settings:
        return
    kind = _quantisation(settings if isinstance(settings, dict) else {})
    if kind.lower() not in QUANTISED:
        raise UnsupportedModelError(
            f"config.json: quantization_config: weights in the format {kind!r} are not supported; "
            f"use weights that are not quantised, in {listed(QUANTISED)}, or a .gguf file"
        )
    blocks = [settings.get("weight_block_size")]
    groups = {} if kind == "pack-quantized" else settings.get("config_groups") or {}
    for group in groups.values():
        weights = group.get("weights") or {}
        blocks += [weights.get("block_structure"), [weights.get("group_size") or 1]]
    for size in (size for block in blocks for size in block or ()):
        # `_with_scales` derives the size from the shapes of matrix and scale.
        power_of_two = size < 1 or size & (size - 1) == 0
        refuse_unless(power_of_two, f"quantization_config: blocks of {size}")


def _quantisation(settings: Mapping[str, Any]) -> str:
    """Return the name of a format of quantised weights, with its layout unless it is read."""
    method = str(settings.get("quant_method")).lower()
    if method in LAYOUTS:
        given = (settings.get(name) for name in ("checkpoint_format", "version", "format"))
        layout = str(next(filter(None, given), LAYOUTS[method])).lower()
        return method if layout == LAYOUTS[method] else f"{method} ({layout})"
    names = ("format", "quant_algo", "quant_method")
    return str(next((settings[name] for name in names if name in settings), "unknown"))


def dequantised(tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Replace quantised matrices and their scales by the float32 matrices that they stand for."""
    plain = dict(tensors)
    for name in tensors:
        for ending, (read, endings) in PACKED.items():
            if name.endswith(ending):
                module = name.removesuffix(ending)
                parts = [plain.pop(module + x, None) for x in endings]
                if (matrix := f"{module}.weight") in plain:
                    file = tensors[name].file
                    raise InputError(f"{file}: {name} next to {matrix}; get the files again")
                plain[matrix] = read(matrix, *parts)
    return _with_scales(plain)


def _in_127ths(
    name: str, codes: TensorSource | None, scale: TensorSource, layout: TensorSource | None
) -> TensorSource:
    """Return a matrix of bitsandbytes in 8 bits; its layout is 0 if it has row after row."""
    refusal = refusal_of(codes, scale, layout)
    if codes is None or codes.dtype != np.int8 or len(codes.shape) != 2:
        raise refusal
    if scale.shape != codes.shape[:1] or not is_float(scale):
        raise refusal
    if layout is not None and (math.prod(layout.shape) != 1 or layout.read().any()):
        raise refusal

    def read() -> Float32[np.ndarray, "f e"]:
        return codes.read() * (scale.read().astype(np.float32) / 127)[:, None]

    return codes._replace(name=name, dtype=np.dtype(np.float32), read=read, bits=8)


def _compressed(
    name: str,
    words: TensorSource,
    scale: TensorSource | None,
    zero: TensorSource | None,
    group: TensorSource | None,
    size: TensorSource | None,
    divisor: TensorSource | None,
) -> TensorSource:
    """Return a packed matrix of compressed-tensors; `size` is its shape."""
    if words.dtype != np.uint8 and divisor is None:
        return _unpacked(name, words, scale, zero, group, size)
    if any((zero, group, size)):
        raise refusal_of(words, scale, zero, group, size, divisor)
    return float4(name, words, scale, divisor, np.divide)


def _unpacked(
    name: str,
    words: TensorSource,
    scale: TensorSource | None,
    zero: TensorSource | None,
    group: TensorSource | None,
    size: TensorSource | None = None,
) -> TensorSource:
    """Return the matrix whose codes are in words of 32 bits."""
    refusal = refusal_of(words, scale, zero, group, size)
    tables = words, scale or words, zero or words
    needed = size if words.name.endswith(COMPRESSED) else zero
    if not scale or not needed or any(len(x.shape) != 2 or 0 in x.shape for x in tables):
        raise refusal
    if size is not None:
        if size.shape != (2,) or size.dtype.kind != "i":
            raise refusal
        form, (outputs, inputs) = "compressed", map(int, size.read())
        codes = _codes_in_word(inputs, words.shape[1])
    else:
        assert zero is not None
        form, outputs = "awq" if words.shape[1] == zero.shape[1] else "gptq", scale.shape[1]
        codes = _codes_in_word(outputs, zero.shape[1])
        inputs = words.shape[0] * (1 if form == "awq" else codes)
    if codes == 0 or (form == "awq" and codes != len(AWQ_PLACES)):
        raise refusal
    packed = _Packed(form, codes, (outputs, inputs), words, scale, zero, group)
    by_codes, groups = -(-outputs // codes), packed.turned(scale.shape)[1]
    expected = (by_codes, inputs) if form == "awq" else (outputs, -(-inputs // codes))
    fits = [
        packed.turned(words.shape) == expected,
        packed.turned(scale.shape) == (outputs, groups),
        zero is None or packed.turned(zero.shape) == (by_codes, groups),
        words.dtype == np.int32 == (zero or words).dtype,
        is_float(scale),
        inputs % groups == 0 if group is None else group.shape == (inputs,),
        group is None or group.dtype.kind == "i",
    ]
    if not all(fits):
        raise refusal
    float32, bits = np.dtype(np.float32), WORD // codes
    return TensorSource(name, words.file, packed.shape, float32, packed.read, words.release, bits)


# By the ending of a name: a reader, and the endings of the parts that it takes.
PACKED: dict[str, tuple[Callable[..., TensorSource], tuple[str, ...]]] = {
    COMPRESSED: (
        _compressed,
        (
            *(COMPRESSED, ".weight_scale", ".weight_zero_point", ".weight_g_idx"),
            *(".weight_shape", ".weight_global_scale"),
        ),
    ),
    ".qweight": (_unpacked, (".qweight", ".scales", ".qzeros", ".g_idx")),
    ".weight_scale_2": (
        functools.partial(float4, combine=np.multiply),
        (".weight", ".weight_scale", ".weight_scale_2"),
    ),
    ".SCB": (_in_127ths, (".weight", ".SCB", ".weight_format")),
    ".weight.quant_map": (bitsandbytes, tuple(f".weight{x}" for x in BITSANDBYTES)),
}


def _codes_in_word(numbers: int, words: int) -> int:
    """Return how many codes a word holds, if these words hold these numbers; 0 if they do not."""
    return next((codes for codes in (8, 4) if -(-numbers // codes) == words), 0)


class _Packed(NamedTuple):
    """A packed matrix in a form: "compressed", "gptq" or "awq", with a number of codes in a word.

    Only the first has outputs on the first axis; others are `turned`. Then words of the matrix hold
    neighbours on the second axis, except for AWQ's, and those of zeros on the first.
    """

    form: str
    codes: int
    shape: tuple[int, int]
    words: TensorSource
    scale: TensorSource
    zero: TensorSource | None
    group: TensorSource | None

    def turned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.form == "compressed" else shape[::-1]

    def read(self) -> Float32[np.ndarray, "f e"]:
        """Return the matrix."""
        outputs, inputs = self.shape
        table = self._decoded(self.words, 0 if self.form == "awq" else 1)[:outputs, :inputs]
        scales = self._array(self.scale).astype(np.float32)
        most = (1 << WORD // self.codes) - 1
        zeros = np.full(scales.shape, most // 2 + 1, np.uint8)
        if self.zero is not None:
            zeros = self._decoded(self.zero, 0)[:outputs]
        if self.form == "gptq":
            zeros = (zeros + 1) & most
        groups = self._groups(inputs, scales.shape[1])
        values, step = np.empty(self.shape, np.float32), max(1, AT_ONCE // inputs)
        for start in range(0, len(values), step):
            rows = slice(start, start + step)
            values[rows] = table[rows]
            shift, factor = zeros[rows], scales[rows]
            if groups is not None:
                shift, factor = shift[:, groups], factor[:, groups]
            blocks = values[rows].reshape(*shift.shape, -1)
            blocks -= shift[..., None]
            blocks *= factor[..., None]
        return values

    def _groups(self, inputs: int, count: int) -> Int[np.ndarray, " e"] | None:
        """Return the group of each input; None if groups are of equal size, one after another."""
        if self.group is None:
            return None
        groups = self.group.read()
        if np.any(groups < 0) or np.any(groups >= count):
            problem = f"has groups other than 0 to {count - 1}; get the files again"
            raise InputError(f"{self.group.file}: {self.group.name} {problem}")
        equal = np.repeat(np.arange(count), -(-inputs // count))[:inputs]
        return groups if inputs % count or np.any(groups != equal) else None

    def _array(self, part: TensorSource) -> np.ndarray:
        return part.read() if self.form == "compressed" else part.read().T

    def _decoded(self, part: TensorSource, axis: int) -> UInt8[np.ndarray, "m n"]:
        """Return the codes in words that hold neighbours on an axis."""
        words = np.ascontiguousarray(self._array(part)).view(np.uint32)
        bits, shape = WORD // self.codes, list(words.shape)
        codes = np.empty((*shape[: axis + 1], self.codes, *shape[axis + 1 :]), np.uint8)
        for i in range(self.codes):
            place = AWQ_PLACES[i] if self.form == "awq" else i
            codes[(slice(None),) * (axis + 1) + (i,)] = words >> bits * place & (1 << bits) - 1
        shape[axis] *= self.codes
        return codes.reshape(shape)


def _with_scales(tensors: dict[str, TensorSource]) -> dict[str, TensorSource]:
    """Replace matrices in FP8 or int8 by those that they stand for."""
    scales = {
        f"{name.removesuffix(ending)}.weight": tensors[name]
        for ending in SCALES
        for name in tensors
        if name.endswith(ending)
    }
    plain = {n: t for n, t in tensors.items() if not n.endswith((*SCALES, *OTHER_SCALES))}
    for name, tensor in plain.items():
        if scales and name.endswith(("weight_zero_point", "weight_g_idx")):
            problem = "matrices with zero points or reordered columns are not supported"
            raise UnsupportedModelError(f"{tensor.file}: {name}: {problem}")
        if tensor.dtype == FP8 and name not in scales:
            raise InputError(
                f"{tensor.file}: {name} is in FP8 without a scale; get the files again"
            )
    for name, scale in scales.items():
        matrix = plain.get(name)
        if matrix is None or matrix.bits or len(matrix.shape) != 2:
            raise InputError(f"{scale.file}: {scale.name} without a matrix; get the files again")
        parts = (scale.shape[0] if scale.shape else 1, math.prod(scale.shape[1:]))
        height, width = (
            next((1 << i for i in range(32) if -(-size >> i) == part), 0)
            for size, part in zip(matrix.shape, parts, strict=True)
        )
        if not height or not width:
            shapes = f"{scale.name} is {list(scale.shape)} for a matrix of {list(matrix.shape)}"
            raise InputError(f"{scale.file}: {shapes}; get the files again")
        if not is_float(scale):  # exponents, of formats such as MXFP8
            problem = f"scales in {scale.dtype} are not supported"
            raise UnsupportedModelError(f"{scale.file}: {scale.name}: {problem}")
        read = functools.partial(_product, matrix, scale, parts, (height, width))
        plain[name] = matrix._replace(dtype=np.dtype(np.float32), read=read, bits=8)
    return plain


def _product(
    matrix: TensorSource, scale: TensorSource, parts: tuple[int, int], block: tuple[int, int]
) -> np.ndarray:
    """Return a matrix times its scale, which has a number for each block."""
    values, (height, width) = matrix.read().astype(np.float32), block
    scales = scale.read().astype(np.float32).reshape(parts)
    for row, factors in zip(range(0, len(values), height), scales, strict=True):
        values[row : row + height] *= np.repeat(factors, width)[: values.shape[1]]
    return values
