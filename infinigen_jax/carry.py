"""What a decode step hands from layer to layer."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.models import Params
from infinigen_jax.policies.base import Policy
from infinigen_jax.reuse import HotSet
from infinigen_jax.selection import Request


class Weights(NamedTuple):
    """Everything constant: the model's parameters and the policy's, one per host layer."""

    params: Params
    policy: tuple[Params, ...]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Own:
    """A layer's own settings of the policy; static."""

    policy: Policy


class Following(NamedTuple):
    """What a layer needs of one behind it to speculate for that.

    Attributes:
        own: where they are not those of all layers.
    """

    params: Params
    weights: Params
    state: Any
    number: Int[Array, ""]
    positions: Int[Array, "b k t"] | None = None
    own: Own | None = None


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
        fetched: the next layer's rows.
    """

    x: Float[Array, "b e"]
    fetched: Fetched | None
    counts: Counts
