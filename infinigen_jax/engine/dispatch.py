"""Dispatch of compiled decode steps, in either schedule.

Nothing here waits for the device or reads from it.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.cache import Cache, ReadCache, StepCache
from infinigen_jax.cache.host_array import Placement
from infinigen_jax.decode.state import Counts
from infinigen_jax.decode.steps import Watch, flush_cache, step, steps
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.sampling import Sampling


class Progress(NamedTuple):
    """State that a decode step takes and returns.

    Attributes:
        cache: cache of the batch. A step is donated the arrays it replaces.
        drawn: next tokens, not cached yet.
        draws: number of tokens drawn so far in each row.
    """

    cache: Cache
    drawn: Int[Array, " b"]
    draws: Int[Array, " b"]


class Stepped(NamedTuple):
    """Result of a decode step.

    Attributes:
        progress: state for the next step.
        counts: numbers of selected and moved rows.
        place: first place with a value that is not finite, if the step was checked; see
            `decode.finite_check`.
    """

    progress: Progress
    counts: Counts
    place: list[Array]


class Forced(NamedTuple):
    """Result of a decode step over given tokens.

    Attributes:
        cache: cache after the step.
        drawn: most probable next tokens.
        log_probs: natural log-probabilities of all next tokens.
        counts: numbers of selected and moved rows.
        records: results of `watch`, one per layer.
    """

    cache: Cache
    drawn: Int[Array, " b"]
    log_probs: Float[Array, "b v"]
    counts: Counts
    records: tuple[Any, ...]


class Dispatcher:
    """Decode steps of an engine with one sampling method.

    Attributes:
        seed: sampling seed on the device; an argument, not part of the compiled program.
        numbers: indices of the host layers, on the device.
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
        """Dispatch a step over the last drawn tokens."""
        with jax.transfer_guard("disallow"):
            return self._by_layer(progress) if self._layerwise else self._fused(progress)

    def force(self, cache: Cache, tokens: np.ndarray | Array, watch: Watch | None = None) -> Forced:
        """Dispatch a step over given tokens; see `Run.predict` and `Run.watch`.

        Tokens on the device are not waited for.
        """
        at, run = Placement(self.decoder.mesh), self._steps
        on_device = isinstance(tokens, jax.Array)
        inputs = tokens if on_device else jax.device_put(np.asarray(tokens, np.int32), at.batch)
        parts = cache.parts(self.decoder.policy.observes)
        records: tuple[Any, ...] = ()
        if watch is not None:
            outcome = run.watched(self.weights, *parts, inputs, watch=watch)
            new, log_probs, drawn, counts, records = outcome
        elif self._layerwise:
            x, new, counts, _ = self._layers(*parts, inputs)
            embedding = self.weights.params["embedding"]
            log_probs, drawn, lengths = run.predict(embedding, x, new.lengths)
            new = new._replace(lengths=lengths)
        else:
            new, log_probs, drawn, counts = run.forced(self.weights, *parts, inputs)
        return Forced(cache.stepped(new), drawn, log_probs, counts, records)

    def flush(self, cache: Cache) -> Cache:
        """Write the rows of the rings to the host and return the new cache."""
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
