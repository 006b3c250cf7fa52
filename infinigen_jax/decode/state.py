"""What a decode step reads and replaces, layer by layer, and what layers hand to each other."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.hot_set import HotSet
from infinigen_jax.cache.layers import HostLayer, Local
from infinigen_jax.cache.pool import Kept
from infinigen_jax.models import Params
from infinigen_jax.selection.select import Request


class Weights(NamedTuple):
    """Everything constant: the model's parameters and the policy's, one per host layer."""

    params: Params
    policy: tuple[Params, ...]


class Target(NamedTuple):
    """A layer on the host that rows are selected for.

    Attributes:
        params: of the layer.
        weights: what the policy prepared for it.
        state: the policy's state of it.
        number: among the layers on the host.
        positions: of the rows in its pool; None where slot = position.
    """

    params: Params
    weights: Params
    state: Any
    number: Int[Array, ""]
    positions: Int[Array, "b k t"] | None = None


class LayerInputs(NamedTuple):
    """What one layer of a step reads.

    Attributes:
        params: of the layer, on the device.
        upcoming: parameters of the next layer, if they are kept in host memory; else nothing.
        host: the host cache; None if no layer uses it.
        place: where and how the host keeps this layer's rows; None for a layer on the device.
        target: the layer that this one requests rows for; None if it requests none.
        positions: of the current tokens.
    """

    params: Params
    upcoming: list[Params]
    host: Shaped[Array, "l a k t w"] | None
    place: HostLayer | None
    target: Target | None
    positions: Int[Array, " b"]


class LayerState(NamedTuple):
    """What one layer of a step replaces.

    Attributes:
        local: the layer's rows on the device.
        hot: the hot set of the target, if it has one; of a pool, what it keeps.
        observed: the policy's state of this layer, if the policy observes; else None.
    """

    local: Local
    hot: HotSet | Kept | None
    observed: Any


class Fetched(NamedTuple):
    """Rows that were requested for a layer, as the host stores them.

    Attributes:
        rows: None where the transfer leaves them in the host cache, see `Transfer.in_place`.
    """

    request: Request
    rows: Shaped[Array, "b k n w"] | None


class Counts(NamedTuple):
    """Rows of a step so far, all layers and KV heads together.

    Attributes:
        selected: that attention wanted from the host cache.
        moved: of these, those that had to come from the host; the hot set had the others.
    """

    selected: Int[Array, " b"]
    moved: Int[Array, " b"]

    def add(self, request: Request, moved: Int[Array, "b k"]) -> "Counts":
        return Counts(
            self.selected + jnp.sum(request.count, axis=-1), self.moved + jnp.sum(moved, axis=-1)
        )


class Started(NamedTuple):
    """A transfer under way.

    Attributes:
        moved: rows that really cross, per sequence and KV head.
        hot: the hot set with its directory as it will be, its rows as they were.
        used: of a pool, as it will be.
    """

    request: Request
    ticket: Any
    moved: Int[Array, "b k"]
    hot: HotSet | None
    used: Shaped[Array, "b k t"] | None = None


class Carry(NamedTuple):
    """What goes from layer to layer.

    Attributes:
        x: the hidden state.
        fetched: rows that were requested for the next layer.
    """

    x: Float[Array, "b e"]
    fetched: Fetched | None
    counts: Counts
