"""Weights in host memory, for models larger than the device: streamed one layer ahead.

    layer l      on the device: its weights, and those of layer l+1 on their way
    always       embeddings, what a policy prepared, and of each layer what its queries are made by:
                 rows are requested for layer l+1 at the beginning of layer l

In the fused step the copy of layer l+1's weights is tied to layer l at both ends, so that two
layers' worth is on the device and no more: otherwise XLA would start all copies at once. Compiled
for a GPU, that holds, but most of the copies are awaited as soon as they are started, and the
fetched rows as well: they do not overlap with the layer's work yet.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from infinigen_jax.errors import InputError
from infinigen_jax.memory import HOST, Placement, default_mesh, to_device
from infinigen_jax.models import Params

WEIGHTS = ("device", "host")
STAYS = ("attention_norm", "q", "q_norm")


def check_weights(weights: str) -> None:
    """Refuse another place than device or host memory."""
    if weights not in WEIGHTS:
        raise InputError(f"--weights {weights}: use {' or '.join(WEIGHTS)}")


def placement(layers: Any, weights: str, mesh: Mesh) -> Any:
    """Where each array of the layers' parameters lives: a tree of shardings."""
    device = Placement(mesh).whole
    host = NamedSharding(mesh, device.spec, memory_kind=HOST)

    def place(path: Any, leaf: Any) -> NamedSharding:
        return host if weights == "host" and path[1].key not in STAYS else device

    return jax.tree_util.tree_map_with_path(place, layers)


def placed(layer: Params, weights: str) -> Params:
    """One layer's parameters where they are to live, on the default mesh."""
    if weights == "device":
        return layer
    (there,) = placement([layer], weights, default_mesh())
    return jax.device_put(layer, there)


def start_copy(params: Params, x: Array) -> tuple[Params, Array]:
    """A layer's parameters, on their way to the device from where x is computed on."""
    moved = {name: value for name, value in params.items() if name not in STAYS}
    x, moved = lax.optimization_barrier((x, moved))
    return params | jax.tree.map(to_device, moved), x


@functools.cache
def bring(mesh: Mesh) -> Any:
    """A compiled function (params, x) -> (params, x): a layer's parameters, copied at once."""
    at = Placement(mesh)

    def copied(params: Params, x: Array) -> tuple[Params, Array]:
        return await_copy(*start_copy(params, x))

    return jax.jit(copied, donate_argnums=1, out_shardings=(at.whole, at.batch))


def await_copy(params: Params, x: Array) -> tuple[Params, Array]:
    """The parameters, there when x is."""
    return lax.optimization_barrier((params, x))
