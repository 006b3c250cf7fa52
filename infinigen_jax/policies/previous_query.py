"""Selection by the exact scores of the query of the token before (the idea of FreeKV, ICLR 2026).

Like the oracle it keeps every key on the device, and is for study.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from infinigen_jax.models.base import ModelConfig, Params
from infinigen_jax.ops.span import Span
from infinigen_jax.policies.base import Attended, Lookup
from infinigen_jax.policies.oracle import Oracle
from infinigen_jax.selection.select import Request


class Remembered(NamedTuple):
    """The keys, and the layer's query at the token before."""

    keys: Float[Array, "b k d t"]
    query: Float[Array, "b k g d"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreviousQuery(Oracle):
    """As the oracle, with the true query of the token before.

    Nothing waits: what the next token reads is known as soon as this one has been attended.
    """

    name: ClassVar[str] = "previous-query"
    observes: ClassVar[bool] = True

    @property
    def lead(self) -> int:
        return 1

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Remembered:
        shape = (batch, config.num_kv_heads, config.group_size, config.head_dim)
        return Remembered(super().init(config, batch, capacity), jnp.zeros(shape, jnp.float32))

    def observe_queries(
        self,
        state: Remembered,
        queries: Float[Array, "b c h d"],
        received: Float[Array, "b k t"],
        span: Span,
    ) -> Remembered:
        last = jnp.maximum(span.count - 1, 0)[:, None, None, None]
        last = jnp.take_along_axis(queries, last, axis=1).reshape(state.query.shape)
        new = (span.count > 0)[:, None, None, None]
        return state._replace(query=jnp.where(new, last.astype(jnp.float32), state.query))

    def select(self, lookup: Lookup) -> Request:
        return self._best_of(lookup.state.query, lookup.state.keys, lookup)

    def observe(self, state: Remembered, seen: Attended) -> Remembered:
        return state._replace(query=seen.query.astype(jnp.float32))

    def append(
        self,
        weights: Params,
        state: Remembered,
        keys: Float[Array, "b k n d"],
        span: Span,
        slots: Int[Array, "b k n"] | None = None,
    ) -> Remembered:
        return state._replace(keys=super().append(weights, state.keys, keys, span, slots))
