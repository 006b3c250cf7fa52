"""Attention to sinks and recent tokens only (StreamingLLM, ICLR 2024), at a budget.

The window grows with the text: in addition to the resident sinks and recent tokens, the most recent
of the remaining tokens are fetched up to the budget. The policy thus moves as many rows as those
that select. Positions are the true ones, not those inside the window.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from infinigen_jax.models.base import ModelConfig, Params
from infinigen_jax.ops.span import Span
from infinigen_jax.policies.base import Budgeted, Lookup
from infinigen_jax.selection.select import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window(Budgeted):
    """Policy that fetches the most recent rows; see the module's docstring."""

    name: ClassVar[str] = "window"
    pools: ClassVar[bool] = True

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Any:
        # An empty array whose shape carries the capacity, which fixes a request's size.
        return jnp.zeros((batch, config.num_kv_heads, capacity, 0), jnp.int8)

    def select(self, lookup: Lookup) -> Request:
        positions, n = lookup.positions, lookup.size
        heads, capacity = lookup.state.shape[1:3]
        if lookup.held is not None:
            return self.choose(lookup.held.astype(jnp.float32)[:, :, None], lookup)
        newest = positions - self.window
        count = jnp.clip(newest - self.sinks + 1, 0, self.most_rows(positions, capacity))
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
