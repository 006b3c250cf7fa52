"""Dispatching what `steps` compiled, in either schedule: Python's part of a decode step.

Nothing here waits for the device, or reads anything of it.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.host_array import Placement
from infinigen_jax.cache.layers import Cache, ReadCache, StepCache
from infinigen_jax.decode.state import Counts
from infinigen_jax.decode.steps import Watch, flush_cache, step, steps
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.sampling import Sampling


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

    def __init__(self, runtime: Runtime, sampling: Sampling):
        at = Placement(runtime.mesh)
        self.decoder = runtime.decoder
        self.weights = runtime.weights
        self.sampling = sampling.unseeded
        self.seed = jax.device_put(np.uint32(sampling.seed), at.whole)
        self.numbers = [
            jax.device_put(np.int32(i), at.whole) for i in range(self.decoder.host_layers)
        ]
        self._steps = steps(self.decoder)
        self._check = runtime.settings.check
        self._layerwise = runtime.settings.schedule == "layerwise" and not self._check

    def advance(self, progress: Progress) -> Stepped:
        """One step over the tokens that were drawn last."""
        with jax.transfer_guard("disallow"):
            return self._by_layer(progress) if self._layerwise else self._fused(progress)

    def force(self, cache: Cache, tokens: np.ndarray, watch: Watch | None = None) -> Forced:
        """One step over given tokens; arguments as in `Run.predict` and `Run.watch`."""
        at, run = Placement(self.decoder.mesh), self._steps
        given = jax.device_put(np.asarray(tokens, np.int32), at.batch)
        parts = cache.parts(self.decoder.policy.observes)
        records: tuple[Any, ...] = ()
        if watch is not None:
            outcome = run.watched(self.weights, *parts, given, watch=watch)
            new, log_probs, drawn, counts, records = outcome
        elif self._layerwise:
            x, new, counts, _ = self._layers(*parts, given)
            embedding = self.weights.params["embedding"]
            log_probs, drawn, lengths = run.predict(embedding, x, new.lengths)
            new = new._replace(lengths=lengths)
        else:
            new, log_probs, drawn, counts = run.forced(self.weights, *parts, given)
        return Forced(cache.stepped(new), drawn, log_probs, counts, records)

    def flush(self, cache: Cache) -> Cache:
        """The cache with the rows of its rings on the host, too."""
        return flush_cache(self.decoder, self.weights, self.numbers, cache)

    def _fused(self, progress: Progress) -> Stepped:
        run = self._steps.checked if self._check else self._steps.fused
        cache = progress.cache
        new, drawn, draws, counts, *place = run(
            self.weights,
            *cache.parts(self.decoder.policy.observes),
            progress.drawn,
            self.seed,
            progress.draws,
            sampling=self.sampling,
        )
        return Stepped(Progress(cache.stepped(new), drawn, draws), counts, place)

    def _by_layer(self, progress: Progress) -> Stepped:
        cache = progress.cache
        parts = cache.parts(self.decoder.policy.observes)
        x, new, counts, _ = self._layers(*parts, progress.drawn)
        drawn, draws, lengths = self._steps.draw(
            self.weights.params["embedding"],
            x,
            self.seed,
            progress.draws,
            new.lengths,
            sampling=self.sampling,
        )
        cache = cache.stepped(new._replace(lengths=lengths))
        return Stepped(Progress(cache, drawn, draws), counts, [])

    def _layers(self, read: ReadCache, live: StepCache, tokens: Array) -> tuple:
        run, numbers = self._steps.pieces, self.numbers
        return step(self.decoder, run, numbers, self.weights, read, live, tokens)
