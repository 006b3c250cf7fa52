"""Selection by the exact scores of a step's own query, for study.

The policy keeps every key of the host layers on the device, half of the cache, and saves no memory.
"""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float, Int

from infinigen_jax.models.base import ModelConfig, Params
from infinigen_jax.ops.attention import soft_capped
from infinigen_jax.ops.span import Span
from infinigen_jax.policies.base import Budgeted, Lookup
from infinigen_jax.selection.select import Request
from infinigen_jax.speculation.index import IndexFormat, write_entries
from infinigen_jax.speculation.query import partial_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(Budgeted):
    """Policy that selects the exact top rows by the softmax summed over each group of query heads.

    The layer waits for its rows, since the selection needs its own query.
    """

    name: ClassVar[str] = "oracle"
    pools: ClassVar[bool] = True

    @property
    def lead(self) -> int:
        return 0

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Float[Array, "b k d t"]:
        return _keys(config.head_dim).empty(batch, config.num_kv_heads, capacity)

    def select(self, lookup: Lookup) -> Request:
        return self._best_of(lookup.query, lookup.state, lookup)

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
        self, query: Float[Array, "b k g d"], keys: Float[Array, "b k d t"], lookup: Lookup
    ) -> Request:
        scores = _keys(query.shape[-1]).scores(query, keys)
        return self.choose(soft_capped(scores, lookup.config.attention_softcap), lookup)


def _keys(head_dim: int) -> IndexFormat:
    """Return the index format that stores whole keys exactly."""
    return IndexFormat("float32", head_dim)
