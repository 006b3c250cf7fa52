"""KV cache of a generation: the host array, rows on the device, and state of the policy.

A decode step takes the part that it only reads (`ReadCache`) and the part that it replaces
(`StepCache`), whose arrays are donated.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Int, Shaped

from infinigen_jax.cache.layers import Local
from infinigen_jax.cache.pool import Hot


class HostLayer(NamedTuple):
    """Place and format of a layer's rows on the host, and arrays for its own query."""

    number: Int[Array, ""]  # among the host layers
    scales: Any  # for decoding the rows, see `cache.row_format`
    weights: dict[str, Any] | None = None  # the policy's; None for a streamed layer
    state: Any = None  # likewise; None if the policy observes
    positions: Int[Array, "b k t"] | None = None  # see `ReadCache.pool_of`


class ReadCache(NamedTuple):
    """Part of a cache that a decode step only reads."""

    host: Shaped[Array, "l a k t w"] | None  # None without host layers
    scales: tuple[Any, ...]
    states: tuple[Any, ...]  # the policy's, per host layer; empty if it observes, see `StepCache`
    pool: tuple[Int[Array, "b k t"], ...]

    def pool_of(self, number: int) -> Int[Array, "b k t"] | None:
        """Return positions of a host layer's rows; None without a pool (slot = position)."""
        return self.pool[number] if self.pool else None


class StepCache(NamedTuple):
    """Part of a cache that a decode step replaces; its arrays are donated."""

    local: tuple[Local, ...]
    hot: tuple[Hot, ...]
    states: tuple[Any, ...]  # the policy's if it observes; else empty
    lengths: Int[Array, " b"]


class Cache(NamedTuple):
    """Complete cache of a generation in progress; see `ReadCache` and `StepCache`."""

    host: Shaped[Array, "l a k t w"] | None
    states: tuple[Any, ...]
    local: tuple[Local, ...]
    lengths: Int[Array, " b"]
    scales: tuple[Any, ...] = ()
    hot: tuple[Hot, ...] = ()
    pool: tuple[Int[Array, "b k t"], ...] = ()

    def parts(self, observes: bool) -> tuple[ReadCache, StepCache]:
        """Split the cache into the part that a step reads and the part that it replaces."""
        read, replaced = ((), self.states) if observes else (self.states, ())
        return (
            ReadCache(self.host, self.scales, read, self.pool),
            StepCache(self.local, self.hot, replaced, self.lengths),
        )

    def stepped(self, new: StepCache) -> "Cache":
        """Return the cache after a step."""
        states = new.states or self.states
        return self._replace(local=new.local, hot=new.hot, states=states, lengths=new.lengths)


def cache_shardings(at: Any) -> Cache:
    """Return the shardings of a cache, given its `Placement`."""
    return Cache(at.host, at.rows, at.rows, at.batch, at.rows, at.rows, at.rows)
