"""Selection by the exact scores of the previous token's query (the idea of FreeKV, ICLR 2026).

For study: like the oracle it keeps every key on the device.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from infinigen_jax.models.base import ModelConfig, Params
from infinigen_jax.ops.span import Span
from infinigen_jax.policies.base import Attended, Keys, Lookup, PoolSlots
from infinigen_jax.policies.oracle import Oracle
from infinigen_jax.selection.select import Request


class Remembered(NamedTuple):
    """Keys of a layer, and its query at the previous token."""

    keys: Float[Array, "b k d t"]
    query: Float[Array, "b k g d"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreviousQuery(Oracle):
    """Oracle that scores with the true query of the previous token.

    No layer waits for its rows: the next token's selection is known after attention to this one.
    """

    name: ClassVar[str] = "previous-query"
    observes: ClassVar[bool] = True
    lead: ClassVar[int] = 1

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Remembered:
        shape = (batch, config.num_kv_heads, config.group_size, config.head_dim)
        return Remembered(super().init(config, batch, capacity), jnp.zeros(shape, jnp.float32))

    def observe_queries(
        self, state: Any, queries: Float[Array, "b c h d"], mass: Any, span: Span
    ) -> Remembered:
        last = jnp.maximum(span.count - 1, 0)[:, None, None, None]
        last = jnp.take_along_axis(queries, last, axis=1).reshape(state.query.shape)
        new = (span.count > 0)[:, None, None, None]
        return state._replace(query=jnp.where(new, last.astype(jnp.float32), state.query))

    def select(self, lookup: Lookup) -> Request:
        return self._best_of(lookup.state.query, lookup.state.keys, lookup)

    def observe(self, state: Remembered, attended: Attended) -> Remembered:
        return state._replace(query=attended.query.astype(jnp.float32))

    def append(
        self, weights: Params, state: Any, keys: Keys, span: Span, slots: PoolSlots | None = None
    ) -> Remembered:
        return state._replace(keys=super().append(weights, state.keys, keys, span, slots))
