"""Dispatch of compiled decode steps, in either schedule, without waiting for the device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.cache import Cache
from infinigen_jax.decode.state import Counts
from infinigen_jax.decode.steps import Watch, flush_cache, host_numbers, single_layers, step, steps
from infinigen_jax.engine.runtime import Runtime


class Stepped(NamedTuple):
    """Result of a decode step; `logits` and `best` are of the next tokens.

    `place` is the first value that is not finite, if checked; see `decode.finite_check`.
    """

    cache: Cache
    logits: Float[Array, "b v"]
    best: Int[Array, " b"]
    counts: Counts
    place: Sequence[Array] = ()
    records: tuple[Any, ...] = ()


class Dispatcher:
    """Decode steps of an engine."""

    def __init__(self, runtime: Runtime, *, drafts: bool = False):
        self.decoder, self.weights = runtime.decoder, runtime.weights
        if drafts:
            self.decoder, self.weights = runtime.drafter
        self._steps, self._numbers = steps(self.decoder), host_numbers(self.decoder)
        self._check = runtime.settings.check
        self._layerwise = runtime.settings.schedule == "layerwise" and not self._check

    def step(self, cache: Cache, tokens: Int[Array, " b"], watch: Watch | None = None) -> Stepped:
        """Dispatch a step over the next token of each sequence, without waiting.

        The arrays of `cache` that the step replaces are donated. `watch` is called between the
        layers' programs; the step then uses the layerwise schedule, with equal results.
        """
        with jax.transfer_guard("disallow"):
            arguments = (self.weights, *cache.parts(self.decoder.policy.observes), tokens)
            if not self._layerwise and watch is None:
                fused = self._steps.checked if self._check else self._steps.fused
                new, logits, best, counts, *place = fused(*arguments)
                return Stepped(cache.stepped(new), logits, best, counts, place)
            pieces = self._steps.pieces
            if watch is not None:
                pieces = pieces._replace(groups=single_layers(self.decoder))
            common = self.decoder, pieces, self._numbers
            x, new, counts, records = step(*common, *arguments, watch)
            embedding = self.weights.params["embedding"]
            logits, best, lengths = self._steps.predict(embedding, x, new.lengths)
            cache = cache.stepped(new._replace(lengths=lengths))
            return Stepped(cache, logits, best, counts, records=records)

    def flush(self, cache: Cache) -> Cache:
        """Write the rows of the rings to the host."""
        return flush_cache(self.decoder, self.weights, cache)
