"""Arrays that the engine passes to a policy: `Lookup` to `select`, `Attended` to `observe`."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from infinigen_jax.models.base import ModelConfig, Params
from infinigen_jax.models.llama import Layer


class Attended(NamedTuple):
    """Rows that a layer attended to in a step, with their attention weights.

    Attributes:
        query: queries of the current tokens, scaled and rotated.
        slots: requested host slots; those beyond the request's count have weight 0.
        weights: attention weights of these slots, summed over each KV head's query heads.
        resident: positions of the rows that stay on the device; -1 for an empty slot.
        resident_weights: their attention weights, summed likewise.
    """

    query: Float[Array, "b k g d"]
    slots: Int[Array, "b k n"]
    weights: Float[Array, "b k n"]
    resident: Int[Array, "b m"]
    resident_weights: Float[Array, "b k m"]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Inputs of a policy's selection for one layer in one step.

    Attributes:
        weights: arrays that `Policy.prepare` returned for the layer.
        state: the policy's state of the layer.
        a: attention input of the layer `lead` earlier; see `Policy.source`.
        size: static number of rows in a request, equal for all layers.
        capacity: number of slots t that the host cache has for each sequence.
        share: numerator and denominator of the layer's budget, for all sequences or for each; None
            if all use the policy's budget.
        held: with a pool, position of the row in each slot, -1 if the slot has no row to fetch.
            None without a pool: slot = position, and every host-only row may be fetched.
        number: index of the layer among those on the host; an engine always gives it.
        exceeded: number of leading slots that some sequence always exceeds; 0 if unknown.
    """

    config: ModelConfig
    layer: Layer
    weights: Params
    state: Any
    a: Float[Array, "b e"]
    positions: Int[Array, " b"]
    size: int
    capacity: int
    share: Int[Array, "*n 2"] | None = None
    held: Int[Array, "b k t"] | None = None
    number: Int[Array, ""] | None = None
    exceeded: int = 0

    @property
    def query(self) -> Float[Array, "b k g d"]:
        """Query computed from `a`, scaled and rotated; the layer's true query if `lead` is 0."""
        return self.config.grouped(self.layer.query(self.a, self.positions))

    @property
    def slot_positions(self) -> Int[Array, "b k t"]:
        """Position of the token in each slot of the host cache; see `held`."""
        if self.held is not None:
            return self.held
        shape = self.positions.shape[0], self.config.num_kv_heads, self.capacity
        return lax.broadcasted_iota(jnp.int32, shape, 2)
