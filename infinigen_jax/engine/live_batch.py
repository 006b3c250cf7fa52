"""Batch for prompts that arrive at any time: sequences join and leave between decode steps.

A prompt is read in chunks of few fixed lengths (`Reading`), so that nothing is compiled after the
first use of each length. A sequence's result does not depend on the others.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import Placement, allocate_host
from infinigen_jax.decode.steps import Watch, steps
from infinigen_jax.engine.batch import Batch
from infinigen_jax.engine.dispatch import Stepped
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.engine.sequence_budgets import SequenceBudgets
from infinigen_jax.errors import ParameterError
from infinigen_jax.prefill.prefill import CHUNK_UNIT, empty_cache, read_chunk


class Single(NamedTuple):
    """A sequence outside of a batch, all of whose rows are on the host.

    Attributes:
        cache: cache of one sequence, with `tokens` tokens.
        logits, best: see `LiveBatch`.
        budget: see `SequenceBudgets.replace`.
    """

    cache: Cache
    tokens: int
    logits: Float[Array, "1 v"]
    best: Int[Array, " 1"]
    budget: float | None


class Reading:
    """A prompt on its way into a cache of one sequence.

    Chunks end at multiples of `chunk` tokens, and at the prompt's end. Chunk boundaries therefore
    do not depend on the number of tokens that were cached before.

    Attributes:
        cache: cache of one sequence; replaced by every chunk, which is donated its arrays.
    """

    def __init__(
        self,
        runtime: Runtime,
        tokens: Sequence[int] | np.ndarray,
        capacity: int,
        chunk: int,
        cache: Cache | None = None,
        done: int = 0,
    ):
        """Prepare to read a prompt; nothing is dispatched yet.

        Args:
            cache: cache that holds the first `done` tokens already, fewer than all.
        """
        self.tokens, self.done = np.asarray(tokens, np.int32), done
        self._runtime, self._chunk = runtime, chunk
        self.cache = empty_cache(runtime.decoder, 1, capacity) if cache is None else cache
        self._lengths = self._put(np.array([len(self.tokens)], np.int32))
        self._last: Float[Array, "1 e"] | None = None

    @property
    def complete(self) -> bool:
        return self.done == len(self.tokens)

    def advance(self) -> None:
        """Wait for the chunk before, and dispatch the next chunk."""
        self.wait()
        end = min(self.done // self._chunk * self._chunk + self._chunk, len(self.tokens))
        count = end - self.done
        size = next(size for size in chunk_lengths(self._chunk) if size >= count)
        piece = np.zeros((1, size), np.int32)
        piece[0, :count] = self.tokens[self.done : end]
        runtime = self._runtime
        self.cache, self._last = read_chunk(
            runtime.decoder,
            runtime.weights,
            self.cache,
            piece,
            np.array([count]),
            self._lengths,
            self._last,
        )
        self.done = end

    @functools.cached_property
    def predicted(self) -> tuple[Float[Array, "1 v"], Int[Array, " 1"]]:
        """Logits of the first new token of a complete prompt, and the most likely token."""
        assert self.complete and self._last is not None
        embedding = self._runtime.weights.params["embedding"]
        predict = steps(self._runtime.decoder).predict
        return predict(embedding, self._last, self.cache.lengths)[:2]

    def single(self, budget: float | None = None) -> Single:
        """Return a complete prompt's sequence; see `Single`."""
        return Single(self.cache, len(self.tokens), *self.predicted, budget)

    def wait(self) -> None:
        """Wait until the chunk in progress is computed."""
        if self._last is not None:
            self._last.block_until_ready()

    def _put(self, array: np.ndarray) -> Array:
        return jax.device_put(array, Placement(self._runtime.mesh).batch)


class OpenBatch(Batch):
    """Batch of sequences that join and leave.

    Attributes:
        active: [b] mask of the sequences that are not idle.
    """

    def __init__(self, runtime: Runtime, cache: Cache):
        batch = len(cache.lengths)
        super().__init__(runtime, np.zeros(batch, np.int32))
        self.budgets, self.cache = SequenceBudgets(runtime, batch), cache
        self.active = np.zeros(batch, bool)

    @property
    def idle(self) -> np.ndarray:
        return ~self.active

    def _join(
        self, sequence: int, one: Cache, tokens: int, others: Any, new: Any, budget: float | None
    ) -> Any:
        """Copy a sequence to the place of an idle one; see `Batch._insert`."""
        assert self.can_join and not self.active[sequence]
        others = self._insert(sequence, one, tokens, others, new)
        self._activate(sequence, budget)
        return others

    def _activate(self, sequence: int, budget: float | None) -> None:
        self.active[sequence] = True
        self.budgets.replace(sequence, budget)
        self.dispatcher.weights = self.budgets.weights

    def leave(self, sequence: int) -> None:
        """Make a sequence idle."""
        self.active[sequence], self._left = False, True


class LiveBatch(OpenBatch):
    """Batch that advances by decode steps.

    A step costs about the same for any number of idle sequences, so a sequence that is alone had
    better be decoded in a batch of one (`of_one`).

    Attributes:
        logits: [b, v] logits of each sequence's next token, float32; see `Sampler`.
        best: [b] most likely next tokens.
    """

    def __init__(self, runtime: Runtime, cache: Cache, logits: Array, best: Array):
        if runtime.settings.lossless:
            raise ParameterError("lossless", "not with single steps; use a `LosslessBatch`")
        super().__init__(runtime, cache)
        self.logits, self.best = logits, best

    @classmethod
    def empty(cls, runtime: Runtime, batch: int, capacity: int) -> "LiveBatch":
        """Return a batch of idle sequences, each with room for `capacity` tokens."""
        vocabulary = runtime.decoder.config.vocab_size
        zeros = np.zeros((batch, vocabulary), np.float32), np.zeros(batch, np.int32)
        others = jax.device_put(zeros, Placement(runtime.mesh).batch)
        return cls(runtime, empty_cache(runtime.decoder, batch, capacity), *others)

    @classmethod
    def of_one(cls, runtime: Runtime, single: Single) -> "LiveBatch":
        """Return a batch of one sequence, which takes over its arrays without a copy."""
        live = cls(runtime, single.cache, single.logits, single.best)
        live.cached = np.array([single.tokens], np.int32)
        live._activate(0, single.budget)
        return live

    def join(self, sequence: int, single: Single) -> None:
        """Copy a sequence to the place of an idle one; it can join several times."""
        new = single.logits, single.best
        self.logits, self.best = self._join(
            sequence, single.cache, single.tokens, (self.logits, self.best), new, single.budget
        )

    def single(self, sequence: int) -> Single:
        """Return an active sequence, to continue elsewhere; it leaves this batch.

        It may leave while others `can_join`. A batch of one gives its own arrays away; a larger one
        copies the sequence out of them.
        """
        assert self.can_join and self.active[sequence]
        budget, tokens = self.budgets.of(sequence), int(self.cached[sequence])
        self.settle()
        cache, logits, best = self.cache, self.logits, self.best
        if len(self.active) > 1:
            host = cache.host
            if host is not None:
                shape = (host.shape[0], 1, *host.shape[2:])
                host = allocate_host(shape, host.dtype, self.runtime.mesh)
            at = jax.device_put(np.int32(sequence), self._at.whole)
            cache, (logits, best) = self._admission.extract(host, cache, (logits, best), at)
        self.leave(sequence)
        return Single(cache, tokens, logits, best, budget)

    def step(self, tokens: Int[Array, " b"], watch: Watch | None = None) -> Stepped:
        """Dispatch a decode step over the next token of each sequence, without waiting.

        An active sequence must have room for the token.

        Returns:
            The step's counts and records; its other arrays belong to the batch.
        """
        stepped = self._step(tokens, watch)
        self.logits, self.best = stepped.logits, stepped.best
        return stepped


def chunk_lengths(chunk: int) -> list[int]:
    """Return the lengths of compiled chunks: powers of two times CHUNK_UNIT, up to `chunk`."""
    lengths = [min(CHUNK_UNIT, chunk)]
    while lengths[-1] < chunk:
        lengths.append(min(2 * lengths[-1], chunk))
    return lengths
