"""Dispatching what `steps` compiled, in either schedule: Python's part of a decode step.

Nothing here waits for the device, or reads anything of it.
"""

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.cache import Cache
from infinigen_jax.carry import Counts
from infinigen_jax.layerwise import by_layer
from infinigen_jax.memory import Placement
from infinigen_jax.sampling import Sampling
from infinigen_jax.steps import Watch, steps

if TYPE_CHECKING:
    from infinigen_jax.engine import Engine


class Progress(NamedTuple):
    """What a decode step goes on from, and makes.

    Attributes:
        cache: its arrays that a step replaces are donated to it.
        drawn: the next tokens, not cached yet.
        draws: how many tokens each row has drawn.
    """

    cache: Cache
    drawn: Int[Array, " b"]
    draws: Int[Array, " b"]


class Stepped(NamedTuple):
    """What a decode step came to.

    Attributes:
        place: first place that is not finite, of a step that was checked, see `checking`.
    """

    progress: Progress
    counts: Counts
    place: list[Array]


class Forced(NamedTuple):
    """What a step over given tokens came to.

    Attributes:
        drawn: the likeliest next tokens.
        log_probs: natural log-probabilities of all next tokens.
        records: what was watched, one a layer.
    """

    cache: Cache
    drawn: Int[Array, " b"]
    log_probs: Float[Array, "b v"]
    counts: Counts
    records: tuple[Any, ...]


class Dispatcher:
    """The steps of one engine and one way to sample.

    Attributes:
        seed: on the device; an argument, not part of the compiled program.
        numbers: of the host's layers, on the device.
    """

    def __init__(self, engine: "Engine", sampling: Sampling):
        at = Placement(engine.mesh)
        self.decoder = engine.decoder
        self.weights = engine.weights
        self.sampling = sampling.unseeded
        self.seed = jax.device_put(np.uint32(sampling.seed), at.whole)
        self.numbers = [
            jax.device_put(np.int32(i), at.whole) for i in range(self.decoder.host_layers)
        ]
        self._steps = steps(self.decoder)
        self._check = engine.check
        self._layerwise = engine.schedule == "layerwise" and not engine.check

    def advance(self, progress: Progress) -> Stepped:
        """One step over the tokens that were drawn last."""
        with jax.transfer_guard("disallow"):
            return self._by_layer(progress) if self._layerwise else self._fused(progress)

    def force(self, cache: Cache, tokens: np.ndarray, watch: Watch | None = None) -> Forced:
        """One step over given tokens; arguments as in `Run.predict` and `Run.watch`."""
        at = Placement(self.decoder.mesh)
        step = self._steps.forced
        if watch is not None:
            step = functools.partial(self._steps.watched, watch=watch)
        given = jax.device_put(np.asarray(tokens, np.int32), at.batch)
        new, log_probs, drawn, counts, *records = step(
            self.weights, *_arguments(cache), given, cache.pool
        )
        return Forced(self._replaced(cache, new), drawn, log_probs, counts, *records or [()])

    def flush(self, cache: Cache) -> Cache:
        """The cache with the rows of its rings on the host, too."""
        if cache.pool:
            return self._steps.flush_pool(self.weights.policy, cache)
        if cache.host is None:
            return cache
        host, states = self._steps.flush(
            self.weights.policy, cache.local, cache.host, cache.states, cache.scales, cache.lengths
        )
        return cache._replace(host=host, states=states)

    def _fused(self, progress: Progress) -> Stepped:
        step = self._steps.checked if self._check else self._steps.fused
        cache = progress.cache
        new, drawn, draws, counts, *place = step(
            self.weights,
            *_arguments(cache),
            progress.drawn,
            self.seed,
            progress.draws,
            sampling=self.sampling,
            pool=cache.pool,
        )
        return Stepped(Progress(self._replaced(cache, new), drawn, draws), counts, place)

    def _replaced(self, cache: Cache, new: Cache) -> Cache:
        """With what a step replaced."""
        states = new.states if self.decoder.policy.observes else cache.states
        return new._replace(host=cache.host, scales=cache.scales, states=states, pool=cache.pool)

    def _by_layer(self, progress: Progress) -> Stepped:
        weights, cache = self.weights, progress.cache
        x, cache, counts = by_layer(self.decoder, weights, cache, progress.drawn, self.numbers)
        drawn, draws, lengths = self._steps.draw(
            weights.params["embedding"],
            x,
            self.seed,
            progress.draws,
            cache.lengths,
            sampling=self.sampling,
        )
        return Stepped(Progress(cache._replace(lengths=lengths), drawn, draws), counts, [])


def _arguments(cache: Cache) -> tuple[Any, ...]:
    """Of a cache, in the order in which the fused steps take it."""
    return cache.host, cache.states, cache.scales, cache.local, cache.hot, cache.lengths
