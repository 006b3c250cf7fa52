"""Weights in host memory, for models larger than the device: streamed one layer ahead.

    layer l      on the device: its weights, and those of layer l+1 on their way
    always       embeddings, what a policy prepared, and of each layer its vectors, and what its
                 queries are made by: rows are requested for layer l+1 within layer l

In the fused step the copy of layer l+1's weights is tied to layer l at both ends, so that two
layers' worth is on the device and no more: otherwise XLA would start all copies at once.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from infinigen_jax.cache.host_array import HOST, Placement, default_mesh, to_device
from infinigen_jax.errors import InputError
from infinigen_jax.models import Params

WEIGHTS = ("device", "host")
STAYS = ("attention_norm", "q", "q_norm")


def check_weights(weights: str) -> None:
    """Refuse another place than device or host memory."""
    if weights not in WEIGHTS:
        raise InputError(f"--weights {weights}: use {' or '.join(WEIGHTS)}")


def in_host_memory(layer: Any) -> Any:
    """Of a layer's parameters, or shapes of them, those to be in host memory; None for the others.

    A copy of a vector, norm or bias, would take as long to start as it saves.
    """

    def choose(path: Any, leaf: Any) -> Any:
        return leaf if path[0].key not in STAYS and leaf.ndim > 1 else None

    return jax.tree_util.tree_map_with_path(choose, layer)


def placement(layers: Any, weights: str, mesh: Mesh) -> Any:
    """Where each array of the layers' parameters lives: a tree of shardings."""
    device = Placement(mesh).whole
    host = NamedSharding(mesh, device.spec, memory_kind=HOST)

    def place(leaf: Any, moved: Any) -> NamedSharding:
        return device if weights == "device" or moved is None else host

    return [jax.tree.map(place, layer, in_host_memory(layer)) for layer in layers]


def placed(layer: Params, weights: str) -> Params:
    """One layer's parameters where they are to live, on the default mesh."""
    if weights == "device":
        return layer
    (there,) = placement([layer], weights, default_mesh())
    return jax.device_put(layer, there)


def start_copy(params: Params, x: Array) -> tuple[Any, Array]:
    """What a layer has in host memory, on its way to the device from where x is computed on."""
    x, moved = lax.optimization_barrier((x, in_host_memory(params)))
    return jax.tree.map(to_device, moved), x


def start_next(stored: Sequence[Params], x: Array) -> tuple[Any, Array]:
    """The same of the first of these layers; None of none."""
    return start_copy(stored[0], x) if stored else (None, x)


def await_copy(coming: Any, x: Array) -> tuple[Any, Array]:
    """What was started, there when x is."""
    return (None, x) if coming is None else lax.optimization_barrier((coming, x))


def merged(params: Params, brought: Any) -> Params:
    """A layer's parameters, all on the device.

    Those that stay there are not passed through compiled functions, which would copy them.
    """
    return jax.tree.map(lambda stays, moved: stays if moved is None else moved, params, brought)


def bring(mesh: Mesh, params: Params, x: Array) -> tuple[Params, Array]:
    """A layer's parameters, copied at once behind what x is computed by; x is donated."""
    brought, x = _bring(mesh)(in_host_memory(params), x)
    return merged(params, brought), x


@functools.cache
def _bring(mesh: Mesh) -> Any:
    at = Placement(mesh)

    def copied(params: Params, x: Array) -> tuple[Any, Array]:
        return await_copy(*start_copy(params, x))

    return jax.jit(copied, donate_argnums=1, out_shardings=(at.whole, at.batch))
