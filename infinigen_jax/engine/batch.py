"""A batch's cache between decode steps: flushes, and sequences that change hands.

    sequence   0          1      2           an index into every array of the cache
    state      running    idle   running     an idle sequence has at most a window of tokens

A new prompt is prefilled alone, into a cache of one sequence, which then replaces an idle sequence.
Shapes never change, so the compiled programs are reused. Sequences may differ in length: every
`window` steps a flush writes the last `window` rows of each, so every row is on the host before it
leaves the ring, regardless of when its sequence began.
"""

import abc
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import Placement
from infinigen_jax.decode.steps import Watch
from infinigen_jax.engine.batching import insert, rest
from infinigen_jax.engine.dispatch import Dispatcher, Stepped
from infinigen_jax.engine.runtime import Runtime


class Batch(abc.ABC):
    """Sequences that are decoded together.

    A step replaces `cache`, and is donated its arrays. `cached`, [b], are the tokens in it after
    all dispatched steps; the array is never changed in place.
    """

    cache: Cache

    def __init__(self, runtime: Runtime, cached: np.ndarray):
        self.runtime, self.decoder, self.cached = runtime, runtime.decoder, cached
        self.dispatcher, self._at = Dispatcher(runtime), Placement(runtime.mesh)
        self._since_flush, self._left = 0, False

    @property
    @abc.abstractmethod
    def idle(self) -> np.ndarray:
        """Mask of the idle sequences, [b]."""

    @property
    def can_join(self) -> bool:
        """Whether a prompt may replace an idle sequence now.

        If a flush evicts rows or fills pages, all sequences must be at the same step of the window.
        Between lossless rounds this holds, as every row is on the host.
        """
        policy = self.decoder.policy
        at_flush = policy.paged or self.decoder.pool is not None
        return not at_flush or self._since_flush in (0, policy.window) or bool(self.idle.all())

    def settle(self) -> None:
        """Write all cached rows to the host."""
        self.cache = self.dispatcher.flush(self.cache)
        self._since_flush = 0

    def _step(self, tokens: Int[Array, " b"], watch: Watch | None = None) -> Stepped:
        """Dispatch a step over the next token of each sequence; see `Dispatcher.step`."""
        due = self._since_flush == self.decoder.policy.window
        if due or self._left:
            self.rest()
        if due:
            self.settle()
        stepped = self.dispatcher.step(self.cache, tokens, watch)
        self.cache, self.cached = stepped.cache, self.cached + 1
        self._since_flush += 1
        return stepped

    def _insert(self, sequence: int, one: Cache, tokens: int, others: Any, new: Any) -> Any:
        """Replace an idle sequence by that of the cache `one`, with `tokens` tokens.

        Return `others`, a tree of further arrays of the batch, with those of the sequence, `new`.
        """
        if self.idle.all():
            self._since_flush = 0
        at = jax.device_put(np.int32(sequence), self._at.whole)
        self.cache, others = insert(self.decoder, self.cache, others, one, new, at)
        self.cached = np.where(np.arange(len(self.cached)) == sequence, tokens, self.cached)
        return others

    def rest(self) -> None:
        """Set the lengths of idle sequences to 0, so that they never fill the cache."""
        idle = jax.device_put(self.idle, self._at.batch)
        lengths = rest(self.decoder, self.cache.lengths, idle)
        self.cache = self.cache._replace(lengths=lengths)
        self.cached, self._left = np.where(self.idle, 0, self.cached), False
