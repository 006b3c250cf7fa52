"""Modules with a matrix: projections, and the table of token embeddings.

Each holds its matrix in full, or in the form of `models.small_weights`. On a CPU, queries, keys and
values are one joined matrix, {"qkv"} in place of {"q", "kv"}: two short products take longer than
one, because each wakes the other threads. Layers are joined on loading there, or by an engine whose
attention reads rows in the host's memory; `base.Blueprint.layer` accepts either form.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from infinigen_jax.models import small_weights
from infinigen_jax.models.products import product
from infinigen_jax.models.small_weights import Params


def project(a: Float[Array, "*b e"], weights: Params, dtype: Any = None) -> Float[Array, "*b f"]:
    """Apply a projection {"weight" [f, e]}, or one of small weights, with or without a "bias".

    The result has `dtype`, by default that of `a`.
    """
    if "codes" in weights:
        y = small_weights.product(a, weights, dtype)
    else:
        y = product(a, weights["weight"], dtype)
    return y + jnp.broadcast_to(weights["bias"], y.shape) if "bias" in weights else y


def in_full(weights: Params, inputs: int, dtype: Any) -> Params:
    """Return a projection of small weights with a weight [f, inputs]; others unchanged."""
    if "codes" not in weights:
        return weights
    weight = {"weight": small_weights.rows_of(weights, inputs).astype(dtype)}
    return weight | {name: x for name, x in weights.items() if name == "bias"}


class Matrix(nnx.Module):
    """Module of one matrix and perhaps a bias."""

    @property
    def weights(self) -> Params:
        """Arrays by name."""
        variables = vars(self).items()
        return {name: x[...] for name, x in variables if isinstance(x, nnx.Param)}

    def shrink(self, dtype: str) -> None:
        """Replace the matrix by a small one."""
        for name, array in small_weights.shrink_part(self.weights, dtype).items():
            setattr(self, name, nnx.Param(array))
        for name in ("weight", "embedding"):
            if hasattr(self, name):
                delattr(self, name)


class Linear(Matrix):
    """Projection with a weight [outputs, inputs], parameters in `dtype`."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: Any):
        self.weight = nnx.Param(jnp.zeros((outputs, inputs), dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs, dtype))

    def __call__(self, a: Float[Array, "*b e"], dtype: Any = None) -> Float[Array, "*b f"]:
        return project(a, self.weights, dtype)


class TokenTable(Matrix):
    """Embeddings of tokens, and the logits of a model that ties them to these."""

    def __init__(self, vocabulary: int, size: int, dtype: Any):
        self.embedding = nnx.Param(jnp.zeros((vocabulary, size), dtype))
        self.size, self.dtype = size, dtype

    def __call__(self, tokens: Int[Array, "*b"]) -> Float[Array, "*b e"]:
        rows = {name: jnp.take(x, tokens, axis=0) for name, x in self.weights.items()}
        if "embedding" in rows:
            return rows["embedding"]
        return small_weights.rows_of(rows, self.size).astype(self.dtype)

    def attend(self, x: Float[Array, "*b e"], dtype: Any) -> Float[Array, "*b v"]:
        """Return the products with the embeddings of all tokens."""
        weights = self.weights
        if "embedding" in weights:
            weights = {"weight": weights["embedding"]}
        return project(x, weights, dtype)


def join(layer: Params) -> Params:
    """Return a layer's parameters with the projections of queries, keys and values joined."""
    if "qkv" in layer:
        return layer
    rest = {name: part for name, part in layer.items() if name not in ("q", "kv")}
    parts = layer["q"], layer["kv"]
    qkv = {name: jnp.concatenate([p[name] for p in parts]) for name in layer["q"]}
    return rest | {"qkv": qkv}


def split(layer: Params, queries: int) -> Params:
    """Invert `join`."""
    if "qkv" not in layer:
        return layer
    rest = {name: part for name, part in layer.items() if name != "qkv"}
    cut = {name: jnp.split(x, [queries]) for name, x in layer["qkv"].items()}
    q, kv = ({name: pair[i] for name, pair in cut.items()} for i in range(2))
    return rest | {"q": q, "kv": kv}


def part_of(qkv: Params, begin: int, end: int | None) -> Callable[[Array], Array]:
    """Return a function that computes some columns of the joined projection.

    It multiplies by all columns. XLA merges the equal products of a layer into one.
    """
    return lambda a: project(a, qkv)[..., begin:end]
