"""Batch for prompts that arrive at any time: sequences join and leave between decode steps.

A prompt is read in chunks of a few fixed lengths (`Reading`), so nothing is compiled after the
first use of each length. A sequence's result does not depend on the others.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import Placement, allocate_host
from infinigen_jax.decode.steps import Watch, steps
from infinigen_jax.engine.batch import Batch
from infinigen_jax.engine.batching import extract
from infinigen_jax.engine.dispatch import Stepped
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.engine.sequence_budgets import SequenceBudgets
from infinigen_jax.prefill.prefill import empty_cache, read_chunk
from infinigen_jax.settings.engine import CHUNK_UNIT


class Single(NamedTuple):
    """A sequence outside of a batch, all of whose rows are on the host.

    `newest` and `room` are as in `OpenBatch`; only a `LosslessBatch` needs `room`. For `budget` see
    `SequenceBudgets.replace`.
    """

    cache: Cache
    tokens: int
    newest: Any
    budget: float | None = None
    room: int = 0


class Reading:
    """A prompt on its way into a cache of one sequence; each chunk replaces and donates the cache.

    Chunks end at multiples of `chunk` tokens, and at the prompt's end. Chunk boundaries therefore
    do not depend on the number of tokens that were cached before.
    """

    def __init__(
        self,
        runtime: Runtime,
        tokens: Sequence[int] | np.ndarray,
        cache: Cache,
        chunk: int,
        done: int = 0,
    ):
        """Prepare to read a prompt, whose first `done` tokens, fewer than all, are in the cache."""
        self.tokens, self.done = np.asarray(tokens, np.int32), done
        self._runtime, self._chunk = runtime, chunk
        self.cache = cache
        lengths = np.array([len(self.tokens)], np.int32)
        self._lengths = jax.device_put(lengths, Placement(runtime.mesh).batch)
        self._last: Float[Array, "1 e"] | None = None

    @property
    def complete(self) -> bool:
        return self.done == len(self.tokens)

    def advance(self) -> None:
        """Wait for the previous chunk, and dispatch the next one."""
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

    def single(self, newest: Any = None, budget: float | None = None, room: int = 0) -> Single:
        """Return the sequence of a complete prompt; `newest` is `predicted` by default."""
        newest = self.predicted if newest is None else newest
        return Single(self.cache, len(self.tokens), newest, budget, room)

    def wait(self) -> None:
        """Wait until the chunk in progress is computed."""
        if self._last is not None:
            self._last.block_until_ready()


class OpenBatch(Batch):
    """Batch of sequences that join and leave.

    A step or round costs about the same for any number of idle sequences. A sequence that is alone
    is therefore better decoded in a batch of one, which takes it over without a copy (`take`).

    Attributes:
        active: [b] mask of the sequences that are not idle.
        newest: arrays that each sequence continues from, in addition to the cache.
        room: [b] maximum number of tokens that each sequence still gets, if known; 0 for idle ones.
        selecting: dispatcher of the steps that select rows by the sequences' budgets.
    """

    newest: Any

    def __init__(self, runtime: Runtime, batch: int):
        super().__init__(runtime, np.zeros(batch, np.int32))
        self.budgets = SequenceBudgets(runtime, batch)
        self.active, self.room = np.zeros(batch, bool), np.zeros(batch, np.int32)
        self.selecting = self.dispatcher

    @classmethod
    def empty(cls, runtime: Runtime, batch: int, capacity: int) -> Self:
        """Return a batch of idle sequences, each with room for `capacity` tokens."""
        live = cls(runtime, batch)
        live.cache = empty_cache(runtime.decoder, batch, capacity)
        return live

    @property
    def idle(self) -> np.ndarray:
        return ~self.active

    def join(self, sequence: int, single: Single) -> None:
        """Copy a sequence to the place of an idle one; it can join several times."""
        assert self.can_join and not self.active[sequence]
        arrays = single.tokens, self.newest, single.newest
        self.newest = self._insert(sequence, single.cache, *arrays)
        self._activate(sequence, single)

    def take(self, single: Single) -> None:
        """Take over the arrays of a sequence; for a batch of one."""
        assert len(self.active) == 1 and not self.active[0]
        self.cache, self.newest = single.cache, single.newest
        self.cached = np.array([single.tokens], np.int32)
        self._since_flush, self._left = 0, False
        self._activate(0, single)

    def release(self) -> Array | None:
        """Free the arrays of an idle batch of one, and return its host array; see `take`."""
        host = self.cache.host
        del self.cache, self.newest
        return host

    def _activate(self, sequence: int, single: Single) -> None:
        self.active[sequence], self.room[sequence] = True, single.room
        self.budgets.replace(sequence, single.budget)
        steps = self.selecting
        steps.weights = steps.weights._replace(policy=self.budgets.weights)

    def single(self, sequence: int, host: Array | None = None) -> Single:
        """Return an active sequence, to continue elsewhere; it leaves this batch. Needs `can_join`.

        A batch of one gives its own arrays away; a larger one copies the sequence out of them, into
        `host` if given (see `empty_cache`).
        """
        assert self.can_join and self.active[sequence]
        budget, tokens = self.budgets.of(sequence), int(self.cached[sequence])
        room = int(self.room[sequence])
        self.settle()
        cache, newest = self.cache, self.newest
        if len(self.active) > 1:
            if cache.host is not None and host is None:
                shape = (cache.host.shape[0], 1, *cache.host.shape[2:])
                host = allocate_host(shape, cache.host.dtype, self.runtime.mesh)
            at = jax.device_put(np.int32(sequence), self._at.whole)
            cache, newest = extract(self.decoder, host, cache, newest, at)
        self.leave(sequence)
        return Single(cache, tokens, newest, budget, room)

    def leave(self, sequence: int) -> None:
        """Make a sequence idle."""
        self.active[sequence], self.room[sequence], self._left = False, 0, True


class LiveBatch(OpenBatch):
    """Batch that advances by decode steps.

    `newest` has the logits of each next token, [b, v] float32, and the most likely ones, [b].
    """

    def __init__(self, runtime: Runtime, batch: int):
        super().__init__(runtime, batch)
        vocabulary = runtime.decoder.config.vocab_size
        zeros = np.zeros((batch, vocabulary), np.float32), np.zeros(batch, np.int32)
        self.newest = jax.device_put(zeros, self._at.batch)

    @property
    def logits(self) -> Float[Array, "b v"]:
        return self.newest[0]

    @property
    def best(self) -> Int[Array, " b"]:
        return self.newest[1]

    def step(self, tokens: Int[Array, " b"], watch: Watch | None = None) -> Stepped:
        """Dispatch a decode step over the next token of each sequence, without waiting.

        An active sequence must have room for the token. Only the step's counts and records are the
        caller's: its other arrays belong to the batch.
        """
        stepped = self._step(tokens, watch)
        self.newest = stepped.logits, stepped.best
        return stepped


def chunk_lengths(chunk: int) -> list[int]:
    """Return the lengths of compiled chunks: powers of two times CHUNK_UNIT, and `chunk`."""
    lengths = [min(CHUNK_UNIT, chunk)]
    while lengths[-1] < chunk:
        lengths.append(min(2 * lengths[-1], chunk))
    return lengths
