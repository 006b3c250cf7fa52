"""Joined projections: queries, keys and values as one matrix, {"qkv"} in place of {"q", "kv"}.

On a CPU two short products take longer than one, because each wakes the other threads. Layers are
joined on loading there, or by an engine whose attention reads rows in the host's memory. Modules
accept either form
(`base.Blueprint.layer`).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

from infinigen_jax.models.linear import project
from infinigen_jax.models.small_weights import Params


def join(layer: Params) -> Params:
    """Return a layer's parameters with the projections joined."""
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
