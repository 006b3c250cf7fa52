"""Undo of drafted steps: arrays that they destroy are copied before, and restored before a commit.

    copied       rings of recent rows, sums over the rows that left them, lengths, and the state of
                 a policy that observes
    harmless     rows of device layers beyond the length; drafted rows never reach the host

Hot sets stay: a draft of at most `window` steps requests only rows that were cached before it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.layers import DenseLayer, Local
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.layer import Decoder


class Saved(NamedTuple):
    """Copies of a cache's arrays; None for layers that steps only extend."""

    local: tuple[Local | None, ...]
    states: tuple[Any, ...]
    lengths: Int[Array, " b"]


def save(decoder: Decoder, cache: Cache) -> Saved:
    """Copy the arrays that decode steps destroy."""
    local = tuple(None if isinstance(x, DenseLayer) else x for x in cache.local)
    states = cache.states if decoder.policy.observes else ()
    return _copied(decoder, Saved(local, states, cache.lengths))


def restore(decoder: Decoder, cache: Cache, saved: Saved) -> Cache:
    """Return the cache before the steps since `save`; both arguments are consumed."""
    local = (now if old is None else old for now, old in zip(cache.local, saved.local, strict=True))
    return cache._replace(
        local=tuple(local),
        states=saved.states or cache.states,
        lengths=saved.lengths,
        hot=_no_later(decoder, cache.hot, saved.lengths) if any(cache.hot) else cache.hot,
    )


@compiled(lambda at: Saved(at.rows, at.rows, at.batch))
def _copied(decoder: Decoder, saved: Saved) -> Saved:
    return jax.tree.map(jnp.copy, saved)


@compiled(lambda at: at.rows, donate_argnums=0)
def _no_later(decoder: Decoder, hot: Any, lengths: Int[Array, " b"]) -> Any:
    """Return hot sets whose entries were used before the next token.

    `cache.hot_set.replacement` evicts the least recently used entry, and the current use must be
    last.
    """
    newest = (lengths - 1)[:, None, None]
    return tuple(x and x._replace(used=jnp.minimum(x.used, newest)) for x in hot)
