"""Inputs and outputs of one layer in a decode step, and the carry between layers."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.cache import HostLayer
from infinigen_jax.cache.hot_set import HotSet
from infinigen_jax.cache.layers import Local
from infinigen_jax.cache.pool import Hot
from infinigen_jax.models import Params
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer.xla import FetchedRows


class Weights(NamedTuple):
    """Constant arrays: parameters of the model, and the policy's arrays of each host layer."""

    params: Params
    policy: tuple[Params, ...]


class Target(NamedTuple):
    """Host layer that rows are selected for.

    Attributes:
        weights: the policy's arrays for the layer, from `Policy.prepare`.
        number: index among the host layers.
        positions: token positions of the rows in its pool; None without a pool.
    """

    params: Params
    weights: Params
    state: Any
    number: Int[Array, ""]
    positions: Int[Array, "b k t"] | None = None


class LayerInputs(NamedTuple):
    """Arrays that one layer of a step reads.

    Attributes:
        upcoming: parameters of the next layer if they are in host memory; else empty.
        host: host cache; None if no layer uses it.
        place: where and how the host keeps this layer's rows; None for a layer on the device.
        target: later layer that this one requests rows for; None if it requests none, or its own.
    """

    params: Params
    upcoming: list[Params]
    host: Shaped[Array, "l a k t w"] | None
    place: HostLayer | None
    target: Target | None
    positions: Int[Array, " b"]


class LayerState(NamedTuple):
    """Arrays that a layer replaces: its rows, the target's hot set, the state if it is observed."""

    local: Local
    hot: Hot
    observed: Any


class Fetched(NamedTuple):
    """Rows requested for a layer, in the host's row format.

    `rows` is None if the transfer leaves them in the host cache (`XlaTransfer.in_place`).
    """

    request: Request
    rows: Shaped[Array, "b k n w"] | None


class Counts(NamedTuple):
    """Rows selected and moved in a step so far, summed over layers and KV heads.

    The hot set holds the selected rows that are not moved.
    """

    selected: Int[Array, " b"]
    moved: Int[Array, " b"]

    def add(self, request: Request, moved: Int[Array, "b k"]) -> "Counts":
        """Return the counts after a request, of which `moved` rows crossed."""
        return Counts(
            self.selected + jnp.sum(request.count, axis=-1), self.moved + jnp.sum(moved, axis=-1)
        )


class Started(NamedTuple):
    """Transfer under way, with the results of `XlaTransfer.fetch`.

    `moved` rows per sequence and KV head cross. `hot` has the new directory and the old rows.
    """

    request: Request
    arrays: FetchedRows
    moved: Int[Array, "b k"]
    hot: HotSet | None
    used: Shaped[Array, "b k t"] | None = None


class Carry(NamedTuple):
    """State handed from layer to layer."""

    x: Float[Array, "b e"]
    fetched: Fetched | None
    counts: Counts
