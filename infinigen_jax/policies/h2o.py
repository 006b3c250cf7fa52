"""H2O (NeurIPS 2023): keep the tokens with the most accumulated attention and discard the others.

The state sums the attention weights that each cached token received from all queries, per KV head.
When a token leaves the recent window and the budget is full, the token with the smallest sum is
evicted for good. The weights are those of the engine's steps, computed over the tokens kept.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from infinigen_jax.models.base import ModelConfig
from infinigen_jax.ops.indexing import by_head
from infinigen_jax.ops.span import Span
from infinigen_jax.policies.base import Attended, Budgeted, Lookup
from infinigen_jax.selection.select import Request

Sums = Float[Array, "b k t"]
EVICTED = -jnp.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class H2O(Budgeted):
    """Policy that keeps the heavy hitters; see the module's docstring."""

    name: ClassVar[str] = "h2o"
    observes: ClassVar[bool] = True

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Sums:
        return jnp.zeros((batch, config.num_kv_heads, capacity), jnp.float32)

    def observe_queries(
        self, state: Sums, queries: Float[Array, "b c h d"], mass: Sums, span: Span
    ) -> Sums:
        return state + mass

    def select(self, lookup: Lookup) -> Request:
        return self.choose(lookup.state[:, :, None], lookup)

    def observe(self, state: Sums, attended: Attended) -> Sums:
        capacity = state.shape[2]
        # Padding is slot 0 with weight 0.
        state = by_head(state, attended.slots).add(attended.weights, mode="drop")
        resident = jnp.where(attended.resident >= 0, attended.resident, capacity)[:, None]
        state = by_head(state, resident).add(attended.resident_weights, mode="drop")
        positions = jnp.max(attended.resident, axis=-1)
        # Rows that were eligible in this step and exceed the budget are evicted for good.
        request = self.best(state[:, :, None], positions, self.request_size(capacity))
        eligible = self.eligible(positions, capacity)
        return jnp.where(eligible & ~request.mask(capacity), EVICTED, state)
