"""KV cache of a generation: the host array, rows on the device, and state of the policy.

A decode step takes the part that it only reads (`ReadCache`) and the part that it replaces
(`StepCache`), whose arrays are donated.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Int, Shaped

from infinigen_jax.cache.layers import Local
from infinigen_jax.cache.pool import Hot


class HostLayer(NamedTuple):
    """Place and format of a layer's rows on the host, and what its own query needs.

    Attributes:
        number: index among the host layers.
        scales: parameters for decoding the rows, see `cache.row_format`.
        weights: the policy's arrays for the layer; None if its own query needs none.
        state: the policy's state of the layer, if its own query selects rows or scores a tail.
        positions: positions of the rows in its pool; None without a pool (slot = position).
    """

    number: Int[Array, ""]
    scales: Any
    weights: dict[str, Any] | None = None
    state: Any = None
    positions: Int[Array, "b k t"] | None = None


class ReadCache(NamedTuple):
    """Part of a cache that a decode step only reads.

    Attributes:
        host: rows of the host layers; None without host layers.
        states: the policy's device state (an index), per host layer; empty if the policy
            observes, since steps then replace it (`StepCache`).
        pool: positions of each host layer's rows; empty without a pool (slot = position).
    """

    host: Shaped[Array, "l a k t w"] | None
    scales: tuple[Any, ...]
    states: tuple[Any, ...]
    pool: tuple[Int[Array, "b k t"], ...]

    def pool_of(self, number: int) -> Int[Array, "b k t"] | None:
        """Return positions of a host layer's rows; None without a pool (slot = position)."""
        return self.pool[number] if self.pool else None


class StepCache(NamedTuple):
    """Part of a cache that a decode step replaces; its arrays are donated.

    `states` is the policy's state if it observes, else empty.
    """

    local: tuple[Local, ...]
    hot: tuple[Hot, ...]
    states: tuple[Any, ...]
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
