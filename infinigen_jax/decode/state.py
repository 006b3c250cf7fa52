"""Inputs and outputs of one layer in a decode step, and the carry between layers."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.cache import HostLayer
from infinigen_jax.cache.layers import Local
from infinigen_jax.cache.pool import Hot
from infinigen_jax.models import Params
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer.rows import FetchedRows


class Weights(NamedTuple):
    """Constant arrays: parameters of the model, and the policy's arrays of each host layer."""

    params: Params
    policy: tuple[Params, ...]


class Target(NamedTuple):
    """Host layer that rows are selected for."""

    params: Params
    weights: Params  # the policy's arrays for the layer, from `Policy.prepare`
    state: Any
    number: Int[Array, ""]  # among the host layers
    positions: Int[Array, "b k t"] | None = None  # of the rows in its pool; None without a pool


class LayerInputs(NamedTuple):
    """Arrays that one layer of a step reads."""

    params: Params
    upcoming: list[Params]  # parameters of the next layer if they are in host memory; else empty
    host: Shaped[Array, "l a k t w"] | None  # None if no layer uses it
    place: HostLayer | None  # of this layer's rows on the host; None for a layer on the device
    target: Target | None  # later layer that this one requests rows for, if any
    positions: Int[Array, " b"]


class LayerState(NamedTuple):
    """Arrays that a layer replaces: its rows, the target's `Hot`, the state if it is observed."""

    local: Local
    hot: Hot
    observed: Any


class Fetched(NamedTuple):
    """Rows requested for a layer, in the host's row format."""

    request: Request
    rows: Shaped[Array, "b k n w"] | None  # None if left in the host cache, `Transfer.in_place`


class Counts(NamedTuple):
    """Rows selected and moved in a step so far, summed over layers and KV heads."""

    selected: Int[Array, " b"]
    moved: Int[Array, " b"]  # the hot set holds the others

    def add(self, selected: Int[Array, "b k"], moved: Int[Array, "b k"]) -> "Counts":
        return Counts(self.selected + jnp.sum(selected, -1), self.moved + jnp.sum(moved, -1))


class Started(NamedTuple):
    """Transfer under way."""

    request: Request
    arrays: FetchedRows
    moved: Int[Array, "b k"]  # rows that cross
    hot: Hot  # with the new directory of its hot set, and the old rows


class Carry(NamedTuple):
    """State handed from layer to layer."""

    x: Float[Array, "b e"]
    fetched: Fetched | None
    counts: Counts
