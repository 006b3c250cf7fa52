"""Attention to sinks and recent tokens only (StreamingLLM, ICLR 2024), at a budget.

The window grows with the text: the policy also fetches the most recent of the remaining tokens, up
to the budget. It thus moves as many rows as the policies that select. Positions are the true ones,
not those inside the window.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
from jax import lax

from infinigen_jax.policies.base import Budgeted, Lookup
from infinigen_jax.selection.select import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window(Budgeted):
    """Policy that fetches the most recent rows; see the module's docstring."""

    name: ClassVar[str] = "window"
    pools: ClassVar[bool] = True

    def select(self, lookup: Lookup) -> Request:
        positions, n = lookup.positions, lookup.size
        if lookup.held is not None:
            return self.choose(lookup.held.astype(jnp.float32)[:, :, None], lookup)
        newest = positions - self.window
        most = self.most_rows(positions, lookup.capacity, share=lookup.share)
        count = jnp.clip(newest - self.sinks + 1, 0, most)
        place = lax.broadcasted_iota(jnp.int32, (positions.shape[0], n), 1)
        slots = jnp.where(place < count[:, None], newest[:, None] - place, 0)
        shape = (positions.shape[0], lookup.config.num_kv_heads)
        return Request(
            jnp.broadcast_to(slots[:, None], (*shape, n)), jnp.broadcast_to(count[:, None], shape)
        )
