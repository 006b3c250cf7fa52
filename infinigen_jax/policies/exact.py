"""Selection by exact scores: the oracle, and the query of the token before.

Both keep every key of the host's layers on the device, half of the cache: they are for study, not
for saving memory.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from infinigen_jax.index import IndexFormat, write_entries
from infinigen_jax.models.base import Layer, ModelConfig, Params
from infinigen_jax.policies.base import Attended, Budgeted
from infinigen_jax.selection import Request
from infinigen_jax.span import Span
from infinigen_jax.speculation import partial_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(Budgeted):
    """The rows that this step's query weighs most: exact top-k, the group's softmax summed.

    It needs the layer's own query, so the layer waits for its rows.
    """

    name: ClassVar[str] = "oracle"
    pools: ClassVar[bool] = True

    @property
    def lead(self) -> int:
        return 0

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Float[Array, "b k d t"]:
        return _keys(config.head_dim).empty(batch, config.num_kv_heads, capacity)

    def select(
        self,
        config: ModelConfig,
        layer: Layer,
        weights: Params,
        state: Float[Array, "b k d t"],
        a: Float[Array, "b e"],
        positions: Int[Array, " b"],
        held: Int[Array, "b k t"] | None = None,
    ) -> Request:
        query = config.grouped(layer.query(a, positions))
        return self._best_of(query, state, positions, held)

    def append(
        self,
        weights: Params,
        state: Float[Array, "b k d t"],
        keys: Float[Array, "b k n d"],
        span: Span,
        slots: Int[Array, "b k n"] | None = None,
    ) -> Float[Array, "b k d t"]:
        new = partial_keys(weights, keys, keys.shape[3])
        return write_entries(state, new, span, slots)

    def _best_of(
        self,
        query: Float[Array, "b k g d"],
        keys: Float[Array, "b k d t"],
        positions: Int[Array, " b"],
        held: Int[Array, "b k t"] | None = None,
    ) -> Request:
        scores = _keys(query.shape[-1]).scores(query, keys)
        return self.choose(scores, positions, held=held)


class Remembered(NamedTuple):
    """The keys, and the layer's query at the token before."""

    keys: Float[Array, "b k d t"]
    query: Float[Array, "b k g d"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreviousQuery(Oracle):
    """As the oracle, with the true query of the token before (the idea of FreeKV, ICLR 2026).

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

    def select(
        self,
        config: ModelConfig,
        layer: Layer,
        weights: Params,
        state: Remembered,
        a: Float[Array, "b e"],
        positions: Int[Array, " b"],
        held: Int[Array, "b k t"] | None = None,
    ) -> Request:
        return self._best_of(state.query, state.keys, positions, held)

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


def _keys(head_dim: int) -> IndexFormat:
    """Keys whole and exact."""
    return IndexFormat("float32", head_dim)
