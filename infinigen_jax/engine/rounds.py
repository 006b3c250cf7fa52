"""Rounds over a batch: tokens are drafted, verified in one pass, and committed; see `lossless`.

Python waits for each part, which times it. The times and the acceptance rate choose the number of
tokens of the next draft.
"""

import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from infinigen_jax.cache.host_array import Placement
from infinigen_jax.decode.finite_check import Places, refuse
from infinigen_jax.decode.state import Counts
from infinigen_jax.decode.steps import Watch
from infinigen_jax.engine.batch import Batch
from infinigen_jax.engine.dispatch import Dispatcher
from infinigen_jax.engine.draft_length import TRIED, DraftLength, size_of
from infinigen_jax.engine.sampler import Draws, Sampler
from infinigen_jax.engine.undo import restore, save
from infinigen_jax.engine.verdict import Verdict, begin, draft, judge
from infinigen_jax.prefill.verification import Verified, commit, verify
from infinigen_jax.sampling import LogProbs


class Given(NamedTuple):
    """Inputs of a round.

    Attributes:
        last: last token of each sequence, not cached yet.
        room: maximum number of tokens that each sequence may still get.
        ends: tokens that end a sequence.
        draws: state of the sampler; None if greedy.
        owner: prompt of each sequence; below 0 for none.
    """

    last: Int[Array, " b"]
    room: Int[Array, " b"]
    ends: Int[Array, " n"]
    draws: Draws | None
    owner: np.ndarray


class Drafted(NamedTuple):
    """A dispatched draft.

    Attributes:
        tokens: the last token and the drafted ones, padded with negative numbers.
        count: number of drafted tokens; `newest` is the last one.
        counts: rows selected and moved in each step.
        places, records: see `dispatch.Stepped`, of all steps.
    """

    tokens: Int[Array, "b c"]
    count: int
    newest: Int[Array, " b"]
    counts: list[Counts]
    places: list[Any]
    records: list[tuple[Any, ...]]


class Judged(NamedTuple):
    """A dispatched verification."""

    given: Given
    drafted: Drafted
    verified: Verified
    verdict: Verdict
    places: Places | None


class Rounds:
    """Drafts and verifications of a batch whose rows are all on the host.

    `drafts` dispatches drafted steps, `length` chooses their number, and `seconds` are the times of
    drafts and of verifications.
    """

    def __init__(self, batch: Batch, length: DraftLength | None = None, *, changing: bool = False):
        """Prepare rounds, with the `length` of earlier rounds of this runtime, if any.

        `changing` states whether texts of any length may join the batch.
        """
        runtime = batch.runtime
        # A cycle would keep a finished batch's cache in memory until a garbage collection.
        self._batch = weakref.proxy(batch)
        self._runtime, self._decoder = runtime, batch.decoder
        self._at = Placement(runtime.mesh)
        most = runtime.most_drafted
        self.length = length or DraftLength(most, ages=changing)
        self.seconds = [0.0, 0.0]
        self.drafts = Dispatcher(runtime, drafts=True)
        self._numbers = [self.put(np.int32(i), self._at.whole) for i in range(most + 1)]

    def put(self, array: np.ndarray | np.int32, sharding: Any = None) -> Array:
        """Copy an array to the device; the caller must not change it afterwards."""
        return jax.device_put(array, sharding or self._at.batch, may_alias=False)

    def ends(self, tokens: Sequence[int]) -> Int[Array, " n"]:
        """Copy the tokens that end a sequence to the device."""
        return self.put(np.array(tokens or [-1], np.int32), self._at.whole)

    def run(self, given: Given, needed: int, *, timed: bool, watch: Watch | None = None) -> Judged:
        """Draft and verify; wait for both.

        A sequence needs at most `needed` tokens. A first round compiles and is not `timed`.
        """
        begun = time.perf_counter()
        drafted = self._draft(given, self._next_count(needed), watch)
        # The verification is dispatched later: its dispatch may wait for the device.
        drafted.newest.block_until_ready()
        between = time.perf_counter()
        judged = self._judge(given, drafted, size_of(drafted.count))
        judged.verdict.count.block_until_ready()
        if timed:
            self._time(drafted.count, between - begun, time.perf_counter() - between)
        return judged

    def _time(self, count: int, draft: float, verification: float) -> None:
        self.length.time_draft(count, draft)
        self.length.time_verification(size_of(count), verification)
        self.seconds = [self.seconds[0] + draft, self.seconds[1] + verification]

    def _next_count(self, needed: int) -> int:
        positions = self._decoder.config.max_positions - 1 - int(self._batch.cached.max())
        return self.length.choose(max(0, min(needed - 1, positions)))

    def _draft(self, given: Given, count: int, watch: Watch | None = None) -> Drafted:
        """Dispatch a draft and undo its traces in the cache, without waiting."""
        batch, decoder, token = self._batch, self._decoder, given.last
        tokens = begin(decoder, token, size=size_of(self.length.most))
        saved = save(decoder, batch.cache) if count else None
        counts, places, records = [], [], []
        for number in self._numbers[1 : count + 1]:
            stepped = self.drafts.step(batch.cache, token, watch)
            batch.cache = stepped.cache
            counts.append(stepped.counts)
            places += stepped.place
            records.append(stepped.records)
            logits, best = stepped.logits, stepped.best
            token, tokens = draft(decoder, tokens, number, logits, best, given.draws)
        if saved is not None:
            batch.cache = restore(decoder, batch.cache, saved)
        return Drafted(tokens, count, token, counts, places, records)

    def _judge(self, given: Given, drafted: Drafted, size: int, *, warm_up: bool = False) -> Judged:
        """Dispatch a verification of `size` tokens; no sequence takes part in a `warm_up`."""
        batch, embedding = self._batch, self._runtime.weights.params["embedding"]
        places = None
        if self._runtime.settings.check:
            places = Places(self._decoder, embedding, len(batch.cached))
        cached = self._decoder, self._runtime.weights, batch.cache
        verified = verify(*cached, drafted.tokens, size, places)
        active = self.put(~batch.idle & (not warm_up))
        inputs = drafted.tokens, given.room, active, given.ends, given.draws
        verdict = judge(self._decoder, embedding, verified.x, *inputs)
        return Judged(given, drafted, verified, verdict, places)

    def read(self, judged: Judged) -> np.ndarray:
        """Record a round and return its new tokens per sequence; may raise NotFiniteError."""
        drafted, counts = judged.drafted, np.asarray(judged.verdict.count)
        checked = [*drafted.places, *([judged.places.place] if judged.places else [])]
        refuse(checked, self._decoder.config.num_layers, judged.given.owner)
        accepted, ended = np.maximum(counts - 1, 0), np.asarray(judged.verdict.room) == 0
        tested = np.where(ended, accepted, np.minimum(counts, drafted.count))
        self.length.record(int(accepted.sum()), int(tested.sum()))
        return counts

    def commit(self, judged: Judged, counts: Int[Array, " b"]) -> None:
        """Store the rows of the leading `counts` tokens of each sequence, without waiting."""
        cached = self._decoder, self._runtime.weights, self._batch.cache
        self._batch.cache = commit(*cached, judged.verified, counts)

    def log_probs(self, judged: Judged, sampler: Sampler) -> list[LogProbs]:
        """Return the log-probabilities of the full model's draws, per place in a round."""
        drawn = np.asarray(judged.verdict.drawn)
        values = sampler.log_probs(judged.verdict.logits, self.put(drawn.reshape(-1)))
        arrays: list[Any] = [np.asarray(x).reshape(*drawn.shape, *x.shape[1:]) for x in values]
        return [LogProbs(*(x[:, place] for x in arrays)) for place in range(drawn.shape[1])]

    def warm_up(self, given: Given, sampler: Sampler | None = None) -> None:
        """Compile and time the verifications of all sizes; they change nothing.

        A `sampler` compiles its log-probabilities as well.
        """
        drafted = self._draft(given, 0)
        for size in self.length.sizes:
            seconds = []
            for _ in range(1 + TRIED):
                began = time.perf_counter()
                judged = self._judge(given, drafted, size, warm_up=True)
                self.commit(judged, judged.verdict.count)
                jax.block_until_ready(self._batch.cache.lengths)
                seconds.append(time.perf_counter() - began)
            if sampler is not None:
                self.log_probs(judged, sampler)
            self.length.time_verification(size, min(seconds))

    def warm_up_draft(self, given: Given, watch: Watch | None = None) -> Drafted:
        """Compile and time the longest draft, and return it; it changes nothing."""
        for number in range(1 if watch else 1 + TRIED):
            began = time.perf_counter()
            drafted = self._draft(given, self.length.most, watch)
            drafted.newest.block_until_ready()
            if number:  # the first one compiles
                self.length.time_draft(drafted.count, time.perf_counter() - began)
        return drafted
