"""The projections to queries, keys and values as one matrix: {"qkv"} in place of {"q", "kv"}.

On a CPU three short products take longer than one, as each wakes the other threads for it. Where
attention reads rows in the host's memory, an engine's layers are joined; their modules take either
form (`base.Blueprint.layer`).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from infinigen_jax.models.products import product

Params = dict[str, Any]


def join(layer: Params) -> Params:
    """A layer's parameters with one matrix for the three."""
    if "qkv" in layer:
        return layer
    rest = {name: part for name, part in layer.items() if name not in ("q", "kv")}
    parts = [(layer["q"][name], layer["kv"][name]) for name in layer["q"]]
    joined = (jnp.concatenate(pair, axis=-1) for pair in parts)
    return rest | {"qkv": dict(zip(layer["q"], joined, strict=True))}


def split(layer: Params, queries: int) -> Params:
    """The inverse of `join`.

    Args:
        queries: columns of the queries' projection.
    """
    if "qkv" not in layer:
        return layer
    rest = {name: part for name, part in layer.items() if name != "qkv"}
    q = {name: x[..., :queries] for name, x in layer["qkv"].items()}
    return rest | {"q": q, "kv": {name: x[..., queries:] for name, x in layer["qkv"].items()}}


def part_of(joined: Params, begin: int, end: int | None) -> Callable[[Array], Array]:
    """A projection that is some columns of the joined one.

    The product is that of all columns, so that those of a layer are one, computed once.
    """

    def project(a: Float[Array, "*b e"]) -> Float[Array, "*b w"]:
        y = product(a, joined["kernel"])
        if "bias" in joined:
            y = y + jnp.broadcast_to(joined["bias"], y.shape)
        return y[..., begin:end]

    return project
