"""Quest (ICML 2024): fetch pages of tokens, ranked by an upper bound on their scores.

The device keeps the minimum and maximum of each key column in a page. For a query q,
sum_i max(q_i min_i, q_i max_i) is at least the score of every key of the page. The bound uses the
step's own query, so the layer waits for its rows. Within a group of query heads, pages are ranked
by the summed softmax of their bounds.
"""

import dataclasses
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from infinigen_jax.models.base import ModelConfig, Params
from infinigen_jax.numeric import OneOf
from infinigen_jax.ops.attention import soft_capped
from infinigen_jax.ops.indexing import by_head
from infinigen_jax.ops.span import Span
from infinigen_jax.policies.base import Budgeted, Keys, Lookup, PoolSlots
from infinigen_jax.selection.select import Request, group_rank
from infinigen_jax.settings.policy import BLOCKS
from infinigen_jax.settings.setting import setting


class Bounds(NamedTuple):
    """Minimum and maximum of each page's keys; +inf and -inf where a page is empty."""

    least: Float[Array, "b k p d"]
    most: Float[Array, "b k p d"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quest(Budgeted):
    """Policy that fetches pages; see the module's docstring."""

    name: ClassVar[str] = "quest"
    paged: ClassVar[bool] = True
    lead: ClassVar[int] = 0

    page: int = setting(16, "tokens in a page, a divisor of 128", "N", OneOf(BLOCKS))

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Bounds:
        shape = (batch, config.num_kv_heads, -(-capacity // self.page), config.head_dim)
        return Bounds(*(jnp.full(shape, x, jnp.float32) for x in (jnp.inf, -jnp.inf)))

    def select(self, lookup: Lookup) -> Request:
        query, state = lookup.query.astype(jnp.float32), lookup.state
        # The larger product comes from the largest key where q > 0 and from the least elsewhere.
        least, most = (jnp.where(jnp.isfinite(x), x, 0) for x in state)
        bound = jnp.einsum("bkgd,bkpd->bkgp", jnp.maximum(query, 0), most)
        bound += jnp.einsum("bkgd,bkpd->bkgp", jnp.minimum(query, 0), least)
        bound = soft_capped(bound, lookup.config.attention_softcap)
        filled = jnp.isfinite(state.least[..., 0])
        rank = group_rank(jnp.where(filled[:, :, None], bound, -jnp.inf))
        rank = jnp.repeat(rank, self.page, axis=2)
        return self.choose(rank[:, :, None], lookup)

    def append(
        self, weights: Params, state: Bounds, keys: Keys, span: Span, slots: PoolSlots | None = None
    ) -> Bounds:
        n = keys.shape[2]
        keys = keys.astype(jnp.float32)
        page = span.positions(n) // self.page
        page = jnp.where(span.holds(n), page, state.least.shape[2])[:, None]  # beyond: dropped
        least = by_head(state.least, page).min(keys, mode="drop")
        return Bounds(least, by_head(state.most, page).max(keys, mode="drop"))
