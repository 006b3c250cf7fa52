"""Selection by the exact scores of a step's own query, for study.

The policy keeps every key of the host layers on the device, half of the cache, and saves no memory.
"""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from infinigen_jax.ops.attention import soft_capped
from infinigen_jax.policies.base import Indexed, Lookup
from infinigen_jax.selection.select import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Oracle(Indexed):
    """Policy that selects the exact top rows by the softmax summed over each group of query heads.

    It needs the layer's own query, so the layer waits for its rows.
    """

    name: ClassVar[str] = "oracle"
    pools: ClassVar[bool] = True
    lead: ClassVar[int] = 0

    def select(self, lookup: Lookup) -> Request:
        return self._best_of(lookup.query, lookup.state, lookup)

    def _best_of(
        self, query: Float[Array, "b k g d"], keys: Float[Array, "b k d t"], lookup: Lookup
    ) -> Request:
        scores = self.index_format(query.shape[-1]).scores(query, keys)
        return self.choose(soft_capped(scores, lookup.config.attention_softcap), lookup)
