"""Weights in host memory, for models larger than the device: streamed one layer ahead.

    layer l      on the device: its weights, and those of layer l+1 while they arrive
    always       embeddings, the policy's arrays, and each layer's vectors and query projection,
                 since layer l requests rows for layer l+1

In the fused step the copy of layer l+1's weights is tied to layer l at both ends, so that the
device holds the weights of two layers. Otherwise XLA would start the copies of all layers together.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from infinigen_jax.cache.host_array import HOST, Placement, default_mesh, to_device
from infinigen_jax.models import Params

STAYS = ("attention_norm", "q", "q_norm")


def in_host_memory(layer: Any) -> Any:
    """Return a layer's parameters (or shapes) that belong in host memory; None for the others.

    Vectors (norms, biases) stay on the device: starting their copy takes longer than it saves.
    """

    def choose(path: Any, leaf: Any) -> Any:
        return leaf if path[0].key not in STAYS and leaf.ndim > 1 else None

    return jax.tree_util.tree_map_with_path(choose, layer)


def placement(layers: Any, weights: str, mesh: Mesh) -> Any:
    """Return the sharding of each array of the layers' parameters."""
    device = Placement(mesh).whole
    host = NamedSharding(mesh, device.spec, memory_kind=HOST)

    def place(leaf: Any, moved: Any) -> NamedSharding:
        return device if weights == "device" or moved is None else host

    return [jax.tree.map(place, layer, in_host_memory(layer)) for layer in layers]


def placed(layer: Params, weights: str) -> Params:
    if weights == "device":
        return layer
    (shardings,) = placement([layer], weights, default_mesh())
    return jax.device_put(layer, shardings)


def start_copy(params: Params, x: Array) -> tuple[Any, Array]:
    """Start to copy a layer's host parameters to the device, after the computation of x."""
    x, moved = lax.optimization_barrier((x, in_host_memory(params)))
    return jax.tree.map(to_device, moved), x


def start_next(stored: Sequence[Params], x: Array) -> tuple[Any, Array]:
    """Start the copy of the first of these layers; return None for no layers."""
    return start_copy(stored[0], x) if stored else (None, x)


def await_copy(copied: Any, x: Array) -> tuple[Any, Array]:
    """Return copied parameters and x, both available after the copy and the computation of x."""
    return (None, x) if copied is None else lax.optimization_barrier((copied, x))


def merged(params: Params, brought: Any) -> Params:
    """Return a layer's parameters, all on the device; `brought` is None if all of them stay there.

    Parameters that stay on the device bypass compiled functions, which would copy them.
    """
    if brought is None:
        return params
    return jax.tree.map(lambda stays, moved: stays if moved is None else moved, params, brought)
