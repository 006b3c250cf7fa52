"""Matrices in two bytes, one byte or half a byte per number, and their products.

A matrix [f, e] is stored by output, in groups of 32 inputs:

    bfloat16    codes uint16, the bits of the numbers
    int8        weight = scale * code, one scale per group; holds blocks of GGUF's Q8_0 exactly
    int4        weight = low + scale * code, two groups per byte; holds Q4_0, Q4_1, Q4_K, AWQ and
                GPTQ without reordered groups exactly

With int4, embeddings and logits are int8, and so are matrices that a file holds in more than four
bits next to others in four (`checkpoint.source.wide_matrices`).

XLA has no fast product of float32 with such numbers on a CPU: it converts the whole matrix first,
and vectorises no loop that sums along a row. `product` therefore writes the sum over groups out, as
additions of vectors of 32 numbers. With the options of a step (`decode.compiler_options`), XLA
compiles them to one loop that reads every code once.
"""

import functools
from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from infinigen_jax.models.products import most_terms
from infinigen_jax.settings.engine import WEIGHT_DTYPES

GROUP = 32  # inputs in a group
AT_ONCE = 2**24  # numbers made int4 at a time, because temporaries take several bytes for each
FEW_ROWS = 16  # rows up to which `product` beats a product with the decoded matrix
UNITS = (1.0, 1 / 16)  # of the low and the high bits of a byte, as `_decoded` returns them
LEVELS = (8, 15)  # least and most steps between the ends of an int4 group
FEW_BITS = WEIGHT_DTYPES[1:]
CODES = {
    jnp.dtype(codes): name
    for codes, name in zip(("uint16", "int8", "uint8"), WEIGHT_DTYPES, strict=True)
}

Params = dict[str, Any]


def small_form(params: Params) -> tuple[str | None, frozenset[str]]:
    """Return the smallest dtype of the matrices of a layer, and the names of those in another.

    The dtype is None if they are as loaded.
    """
    dtypes = {n: CODES[part["codes"].dtype] for n, part in params.items() if "codes" in part}
    smallest = max(dtypes.values(), key=WEIGHT_DTYPES.index, default=None)
    wide = {name for name, dtype in dtypes.items() if dtype != smallest}
    return smallest, frozenset(wide - {"qkv"} | {"q", "kv"} if "qkv" in wide else wide)


def small_dtype(params: Params) -> str | None:
    """Return the smallest dtype of the matrices of a layer; None if they are as loaded."""
    return small_form(params)[0]


def has_few_bits(params: Params) -> bool:
    """Return whether the matrices of a layer have fewer bits than bfloat16."""
    return small_dtype(params) in FEW_BITS


def read_dtype(weight_dtype: str | None, dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype in which matrices are read: few bits are not exact if rounded twice."""
    return jnp.dtype(jnp.float32) if weight_dtype in FEW_BITS else dtype


def shrink(params: Params, dtype: str, wide: Set[str] = frozenset()) -> Params:
    """Return the parameters of a layer or an embedding with small matrices."""
    matrices = {n for n, part in params.items() if "weight" in part or "codes" in part} | {"tokens"}
    return {
        name: shrink_part(part, dtype_of(name, dtype, wide)) if name in matrices else part
        for name, part in params.items()
    }


def dtype_of(name: str, dtype: str, wide: Set[str]) -> str:
    """Return the dtype of a matrix: with int4, `wide` ones, embeddings and logits are int8."""
    return "int8" if dtype == "int4" and name in {"tokens", "head", *wide} else dtype


@functools.partial(jax.jit, static_argnames="dtype")
def shrink_part(part: Params, dtype: str) -> Params:
    """Return {"codes", ...} in place of {"weight" [f, e]} or {"embedding" [f, e]}.

    The matrix may have bfloat16's codes already.
    """
    (name,) = part.keys() & {"embedding", "weight", "codes"}
    rest = {other: x for other, x in part.items() if other != name}
    rows = part[name]
    if name == "codes":
        rows = rows_of(part, rows.shape[-2] * GROUP)
    small, (outputs, inputs) = jax.vmap(functools.partial(_small_row, dtype=dtype)), rows.shape
    size = max(1, AT_ONCE // inputs)
    if dtype != "int4" or outputs <= size:
        return rest | small(rows)

    def put_piece(i: Array, made: Params) -> Params:  # `lax.map` would copy matrix and result
        start = jnp.minimum(i * size, outputs - size)
        piece = small(lax.dynamic_slice_in_dim(rows, start, size))
        return jax.tree.map(
            lambda x, new: lax.dynamic_update_slice_in_dim(x, new, start, 0), made, piece
        )

    made = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(small, rows))
    return rest | lax.fori_loop(0, -(-outputs // size), put_piece, made)


def _small_row(row: Float[Array, " e"], dtype: str) -> Params:
    """Return the numbers for one output of a small matrix."""
    width = GROUP * (2 if dtype == "int4" else 1)
    groups = jnp.pad(row.astype(jnp.float32), (0, -row.size % width)).reshape(-1, GROUP)
    if dtype == "bfloat16":
        return {"codes": lax.bitcast_convert_type(groups.astype(jnp.bfloat16), jnp.uint16)}
    if dtype == "int8":
        scale = jnp.max(jnp.abs(groups), axis=-1) / 127
        codes = jnp.round(groups / _divisor(scale)[..., None])
        return {"codes": codes.astype(jnp.int8), "scale": scale}
    codes, low, scale = _four_bits(groups)
    pairs = codes.reshape(-1, 2, GROUP)
    return {"codes": pairs[:, 0] | (pairs[:, 1] << 4), "low": low, "scale": scale}


def _divisor(scale: Float[Array, "*n"]) -> Float[Array, "*n"]:
    return jnp.where(scale > 0, scale, 1.0)


def _four_bits(groups: Float[Array, "n 32"]) -> tuple[Any, Any, Any]:
    """Return codes below 16, lowest values and steps; choose the step that fits best.

    A group that was quantised before may not use all its levels. A step that divides the distance
    of its ends then fits without an error.
    """
    low, high = jnp.min(groups, axis=-1), jnp.max(groups, axis=-1)

    def codes_of(step: Array) -> Array:
        return jnp.round((groups - low[..., None]) / _divisor(step)[..., None])

    def better(levels: Any, best: tuple[Array, Array]) -> tuple[Array, Array]:
        step = (high - low) / levels
        differences = groups - low[..., None] - codes_of(step) * step[..., None]
        error = jnp.sum(differences**2, axis=-1)
        return jnp.where(error < best[1], step, best[0]), jnp.minimum(error, best[1])

    none = jnp.zeros_like(low), jnp.full_like(low, jnp.inf)
    step, _ = lax.fori_loop(LEVELS[0], LEVELS[1] + 1, better, none)
    return codes_of(step).astype(jnp.uint8), low, step


def rows_of(part: Params, size: int) -> Float[Array, "*f e"]:
    """Return the numbers of a small matrix by output, float32; outputs are the leading axes."""
    codes = part["codes"]
    units = UNITS if codes.dtype == jnp.uint8 else (1.0,)
    groups = jnp.stack([_decoded(codes, i) * unit for i, unit in enumerate(units)], axis=-2)
    groups = groups.reshape(*codes.shape[:-2], -1, GROUP)
    if "scale" in part:
        groups = groups * part["scale"][..., None]
    if "low" in part:
        groups = groups + part["low"][..., None]
    return groups.reshape(*codes.shape[:-2], -1)[..., :size]


def _decoded(codes: Shaped[Array, "*n 32"], half: int) -> Float[Array, "*n 32"]:
    """Return codes as float32; `half` chooses one of two groups that share bytes, in UNITS."""
    if codes.dtype == jnp.uint16:
        return lax.bitcast_convert_type(codes.astype(jnp.uint32) << 16, jnp.float32)
    if codes.dtype == jnp.uint8:
        codes = codes & (240 if half else 15)  # not shifted: CPUs do not shift vectors of bytes
    return codes.astype(jnp.float32)


def decoded_size(params: Params, rows: int) -> int:
    """Return how many numbers `product` decodes for `rows` rows, in all matrices of `params`."""
    codes = [part["codes"] for part in params.values() if "codes" in part and rows > FEW_ROWS]
    return sum(x.size * (2 if x.dtype == jnp.uint8 else 1) for x in codes)


def product(a: Float[Array, "*b e"], part: Params, dtype: Any = None) -> Float[Array, "*b f"]:
    """Return the product with a small matrix in `dtype`, by default a's; sums are float32."""
    dtype = dtype or a.dtype
    rows = a.reshape(-1, a.shape[-1])
    if len(rows) > FEW_ROWS:
        weights = rows_of(part, rows.shape[1]).astype(a.dtype)
        y = lax.dot_general(rows, weights, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    else:
        y = _written_out(rows.astype(jnp.float32), part).astype(dtype)
    return y.reshape(*a.shape[:-1], -1)


def _written_out(rows: Float[Array, "b e"], part: Params) -> Float[Array, "b f"]:
    codes, scale = part["codes"], part.get("scale")
    outputs, units, _ = codes.shape
    each = 2 if codes.dtype == jnp.uint8 else 1  # groups per unit
    terms = most_terms(units)
    x = jnp.pad(rows, ((0, 0), (0, units * each * GROUP - rows.shape[1])))
    x = x.reshape(len(rows), 1, -1, terms, each, GROUP)
    codes = codes.reshape(outputs, -1, terms, GROUP)
    in_units = x * jnp.array(UNITS[:each], jnp.float32).reshape(1, 1, 1, 1, each, 1)
    total: Any = 0.0
    for term in range(terms):
        for half in range(each):
            summand = _decoded(codes[:, :, term], half)[None] * in_units[:, :, :, term, half]
            if scale is not None:
                factors = scale.reshape(1, outputs, -1, terms, each)
                summand = summand * factors[:, :, :, term, half, None]
            total = total + summand
    y = jnp.sum(total, axis=(2, 3))
    if "low" in part:
        sums = jnp.sum(x, axis=-1).reshape(len(rows), -1)
        y = y + lax.dot_general(sums, part["low"], (((1,), (1,)), ((), ())))
    return y
