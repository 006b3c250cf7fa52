"""Attention to sinks and recent tokens only (StreamingLLM, ICLR 2024), at a budget.

The window grows with the text: beside the sinks and the recent tokens that stay on the device, the
most recent of the others are fetched, up to the budget, so that it moves as many rows as the
policies that select. Positions are the true ones, not those inside the window.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from infinigen_jax.models.base import Layer, ModelConfig, Params
from infinigen_jax.policies.base import Budgeted
from infinigen_jax.selection import Request, budget_rows
from infinigen_jax.span import Span


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window(Budgeted):
    """See the module's docstring."""

    name: ClassVar[str] = "window"
    pools: ClassVar[bool] = True

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Any:
        # Nothing, in the shape of what it is nothing of: the capacity fixes a request's size.
        return jnp.zeros((batch, config.num_kv_heads, capacity, 0), jnp.int8)

    def select(
        self,
        config: ModelConfig,
        layer: Layer,
        weights: Params,
        state: Any,
        a: Float[Array, "b e"],
        positions: Int[Array, " b"],
        held: Int[Array, "b k t"] | None = None,
    ) -> Request:
        heads, capacity = state.shape[1:3]
        n = self.request_size(capacity)
        if held is not None:
            return self.choose(held.astype(jnp.float32)[:, :, None], positions, held=held)
        newest = positions - self.window
        count = jnp.clip(newest - self.sinks + 1, 0, budget_rows(self.budget, positions))
        place = lax.broadcasted_iota(jnp.int32, (positions.shape[0], n), 1)
        slots = jnp.where(place < count[:, None], newest[:, None] - place, 0)
        shape = (positions.shape[0], heads)
        return Request(
            jnp.broadcast_to(slots[:, None], (*shape, n)), jnp.broadcast_to(count[:, None], shape)
        )

    def append(
        self,
        weights: Params,
        state: Any,
        keys: Float[Array, "b k n d"],
        span: Span,
        slots: Int[Array, "b k n"] | None = None,
    ) -> Any:
        return state
