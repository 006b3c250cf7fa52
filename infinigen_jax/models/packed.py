"""Joined projections: queries, keys and values as one matrix, {"qkv"} in place of {"q", "kv"}.

On a CPU three short products take longer than one, because each wakes the other threads. An engine
joins its layers where attention reads rows in the host's memory. Modules accept either form
(`base.Blueprint.layer`).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from infinigen_jax.models.products import product

Params = dict[str, Any]


def join(layer: Params) -> Params:
    """Return a layer's parameters with the three projections joined."""
    if "qkv" in layer:
        return layer
    rest = {name: part for name, part in layer.items() if name not in ("q", "kv")}
    parts = [(layer["q"][name], layer["kv"][name]) for name in layer["q"]]
    joined = (jnp.concatenate(pair, axis=-1) for pair in parts)
    return rest | {"qkv": dict(zip(layer["q"], joined, strict=True))}


def split(layer: Params, queries: int) -> Params:
    """Invert `join`.

    Args:
        queries: number of columns of the query projection.
    """
    if "qkv" not in layer:
        return layer
    rest = {name: part for name, part in layer.items() if name != "qkv"}
    q = {name: x[..., :queries] for name, x in layer["qkv"].items()}
    return rest | {"q": q, "kv": {name: x[..., queries:] for name, x in layer["qkv"].items()}}


def part_of(joined: Params, begin: int, end: int | None) -> Callable[[Array], Array]:
    """Return a function that computes some columns of the joined projection.

    It multiplies by all columns. XLA merges the equal products of a layer into one.
    """

    def project(a: Float[Array, "*b e"]) -> Float[Array, "*b w"]:
        y = product(a, joined["kernel"])
        if "bias" in joined:
            y = y + jnp.broadcast_to(joined["bias"], y.shape)
        return y[..., begin:end]

    return project
