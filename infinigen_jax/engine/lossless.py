"""Lossless generation: the policy drafts, the full cache verifies.

    draft     k decode steps with the rows that the policy selects; then their traces are undone
    verify    the full model over the last token and the k drafted ones (`prefill.verification`)
    judge     accepted are the drafted tokens that the full model draws as well (`engine.verdict`)
    commit    the rows that the verification computed are stored for the accepted tokens

The cache after n tokens is thus the one that policy full would have, whatever was drafted. Python
waits for each part, which times it.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int

from infinigen_jax.decode.finite_check import Places, refuse
from infinigen_jax.decode.state import Counts
from infinigen_jax.engine.batching import IDLE
from infinigen_jax.engine.draft_length import DraftLength, size_of
from infinigen_jax.engine.generation import Run
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.engine.stats import Stats, stats_of
from infinigen_jax.engine.undo import restore, save
from infinigen_jax.engine.verdict import Verdict, verdict_steps
from infinigen_jax.errors import InputError
from infinigen_jax.prefill.verification import Verified, commit, verify
from infinigen_jax.programs.compilations import compilations
from infinigen_jax.sampling import LogProbs


@dataclasses.dataclass(frozen=True)
class LosslessStats(Stats):
    """Statistics of a lossless generation.

    `selected_fraction` and `fetched_fraction` are those of the drafted steps. The bytes moved
    include the full cache, once per verification.

    Attributes:
        acceptance_rate: share of the drafted tokens that were accepted.
        tokens_per_verification: new tokens of a sequence per verification, on average.
        draft_tokens: tokens drafted per verification, on average.
        draft_seconds, verification_seconds: times of both parts, without the first round.
    """

    acceptance_rate: float
    tokens_per_verification: float
    draft_tokens: float
    draft_seconds: float
    verification_seconds: float


class Drafted(NamedTuple):
    """A draft that was dispatched.

    Attributes:
        tokens: the last token and the drafted ones, padded with negative numbers.
        count: number of drafted tokens.
        newest: the last one.
        owner: prompt of each row of the batch.
        counts: rows selected and moved in each step.
        places: see `dispatch.Stepped.place`, of all steps.
    """

    tokens: Int[Array, "b c"]
    count: int
    newest: Int[Array, " b"]
    owner: np.ndarray
    counts: list[Counts]
    places: list[Any]


class Judged(NamedTuple):
    """A verification that was dispatched."""

    drafted: Drafted
    verified: Verified
    verdict: Verdict
    places: Places | None


class Tally:
    """Totals over the rounds of a run.

    Attributes:
        drafted, accepted: drafted tokens, and accepted ones, of all sequences.
        verifications: verifications, each counted once per sequence.
        new: new tokens.
        cached: tokens cached, summed over `verifications`.
        seconds: times of drafts and of verifications.
    """

    def __init__(self):
        self.drafted = self.accepted = self.verifications = self.new = self.cached = 0
        self.seconds = [0.0, 0.0]

    def add(self, drafted: int, counts: np.ndarray, cached: np.ndarray) -> None:
        """Add a round; rows without a new token took no part."""
        active = counts > 0
        self.drafted += drafted * int(active.sum())
        self.accepted += int(counts.sum() - active.sum())
        self.verifications += int(active.sum())
        self.new += int(counts.sum())
        self.cached += int(cached[active].sum())


class LosslessRun(Run):
    """A generation that advances by rounds of drafted and verified tokens.

    A round is committed when its tokens were taken: the caller may end a conversation's turn at any
    token, and the cache must hold no later one.
    """

    def __init__(self, runtime: Runtime, *arguments: Any, **options: Any):
        super().__init__(runtime, *arguments, **options)
        most = runtime.most_drafted
        self._length = DraftLength(most, fixed=runtime.settings.draft_tokens is not None)
        self._steps = verdict_steps(self.decoder)
        self._numbers = [self._put(np.int32(i), self._at.whole) for i in range(most + 1)]
        self._tally, self._open = Tally(), None
        self._taken = np.zeros(self.owners.rows, np.int32)
        self._mark = 0.0

    def _put(self, array: np.ndarray | np.int32, sharding: Any) -> Array:
        """Copy an array to the device; the original may change while the copy is under way."""
        return jax.device_put(array, sharding, may_alias=False)

    def advance(self) -> None:
        raise InputError("a lossless run advances by rounds; take its tokens from `tokens`")

    def _force(self, tokens: np.ndarray, watch: Any = None) -> Any:
        raise InputError("a lossless run takes no given tokens; score them without `lossless`")

    def settle(self) -> None:
        """Commit the tokens that were taken of an open round; other rows are on the host."""
        if self._open is not None:
            self._commit(self._open, self._put(self._taken.copy(), self._at.batch))
            self.cached = self.cached + self._taken
            self._open = None

    def tokens(self, *, ignore_eos: bool = False) -> Iterator[list[int | None]]:
        """Yield new tokens, at most one per prompt at a time; None for prompts without one.

        The tokens of a round follow each other. A sequence that accepts fewer has None meanwhile.
        """
        eos = frozenset() if ignore_eos else self.runtime.model.eos_ids
        ends = self._put(np.array([*eos] or [-1], np.int32), self._at.whole)
        first = self._take(np.asarray(self.drawn), eos, self._log_probs)
        self.clock.step(0)
        yield first
        yield from self._admit_prompts(eos)
        self._reset_room()
        while not self.idle.all():
            if self._compiled is None:
                self._warm_up(ends)
            self._mark = time.perf_counter()  # without the time of the consumer of the tokens
            drafted = self._draft()
            self._time_draft(drafted)
            judged = self._judge(drafted, ends)
            self._time_verification(judged)
            counts = self._read(judged)
            yield from self._take_round(judged, counts, eos)
            self._close(judged.verdict)
            yield from self._admit_prompts(eos)

    def _draft(self) -> Drafted:
        """Dispatch a draft and undo its traces in the cache, without waiting."""
        count, token = self._next_count(), self.drawn
        tokens = self._steps.begin(token, size=size_of(self._length.most))
        saved = save(self.decoder, self.cache) if count else None
        counts, places, draws = [], [], self._sampler.draws
        for number in self._numbers[1 : count + 1]:
            stepped = self.dispatcher.step(self.cache, token)
            self.cache = stepped.cache
            counts.append(stepped.counts)
            places += stepped.place
            token, tokens = self._steps.draft(tokens, number, stepped.logits, stepped.best, draws)
        if saved is not None:
            self.cache = restore(self.decoder, self.cache, saved)
        return Drafted(tokens, count, token, self.owners.owner, counts, places)

    def _next_count(self) -> int:
        """Return the number of tokens to draft."""
        owner = self.owners.owner
        needed = [self.max_new_tokens - len(self.new_tokens[i]) for i in owner if i != IDLE]
        positions = self.decoder.config.max_positions - 1 - int(self.cached.max())
        most = min(max(needed, default=1) - 1, positions)
        return self._length.choose(max(0, most))

    def _judge(self, drafted: Drafted, ends: Array, *, warm_up: int | None = None) -> Judged:
        """Dispatch a verification, without waiting.

        Args:
            warm_up: tokens to verify; then no row of the batch takes part.
        """
        embedding, places = self.runtime.weights.params["embedding"], None
        if self.runtime.settings.check:
            places = Places(self.decoder, embedding, self.owners.rows)
        size = warm_up or self._length.size(drafted.count)
        cached = self.decoder, self.runtime.weights, self.cache
        verified = verify(*cached, drafted.tokens, size, places)
        active = self._put(~self.idle & (warm_up is None), self._at.batch)
        inputs = drafted.tokens, self._room, active, ends, self._sampler.draws
        verdict = self._steps.judge(embedding, verified.x, *inputs)
        return Judged(drafted, verified, verdict, places)

    def _commit(self, judged: Judged, counts: Int[Array, " b"]) -> None:
        cached = self.decoder, self.runtime.weights, self.cache
        self.cache = commit(*cached, judged.verified, counts)

    def _close(self, verdict: Verdict) -> None:
        """Commit a round whose tokens were taken, and continue after them."""
        self.settle()
        self.drawn, self._room = verdict.last, verdict.room
        self._sampler.drew(verdict.draws)

    def _read(self, judged: Judged) -> np.ndarray:
        """Record a verification; returns the new tokens per row."""
        drafted, counts = judged.drafted, np.asarray(judged.verdict.count)
        checked = [*drafted.places, *([judged.places.place] if judged.places else [])]
        refuse(checked, self.decoder.config.num_layers, drafted.owner)
        accepted, ended = np.maximum(counts - 1, 0), np.asarray(judged.verdict.room) == 0
        tested = np.where(ended, accepted, np.minimum(counts, drafted.count))
        self._length.record(int(accepted.sum()), int(tested.sum()))
        self.counts += drafted.counts
        self.owners.draft(drafted.owner, self.cached, drafted.count)
        self._tally.add(drafted.count, counts, self.cached)
        self._sampler.count_drawn(counts)
        self.clock.step(int(counts.sum()))
        return counts

    def _take_round(
        self, judged: Judged, counts: np.ndarray, eos: frozenset[int]
    ) -> Iterator[list[int | None]]:
        """Yield the tokens of a round."""
        drawn, owner = np.asarray(judged.verdict.drawn), judged.drafted.owner
        log_probs = self._log_probs_of(judged)
        self._taken, self._open = np.zeros_like(counts), judged
        for place in range(int(counts.max())):
            here = (place < counts) & (self.owners.owner == owner)
            self._taken = self._taken + here
            yield self._take(np.where(here, drawn[:, place], -1), eos, log_probs[place])

    def _log_probs_of(self, judged: Judged) -> Sequence[LogProbs | None]:
        """Return the log-probabilities of the full model's draws, per place in a round."""
        drawn = np.asarray(judged.verdict.drawn)
        if self._alternatives is None:
            return [None] * drawn.shape[1]
        flat = self._put(drawn.reshape(-1), self._at.batch)
        values = self._sampler.log_probs(judged.verdict.logits, flat)
        arrays: list[Any] = [np.asarray(x).reshape(*drawn.shape, *x.shape[1:]) for x in values]
        return [LogProbs(*(x[:, place] for x in arrays)) for place in range(drawn.shape[1])]

    def _admit_prompts(self, eos: frozenset[int]) -> Iterator[list[int | None]]:
        """Give idle rows to waiting prompts, and yield their first tokens."""
        while self.owners.waiting and self.idle.any():
            before = self.owners.owner
            self._rest()
            self._admit()
            new = self.owners.owner != before
            yield self._take(np.where(new, np.asarray(self.drawn), -1), eos, self._log_probs)
            self._reset_room()

    @property
    def can_join(self) -> bool:
        return True  # between rounds every row is on the host

    def _reset_room(self) -> None:
        """Count the tokens that each row may still get."""
        length = [0 if i == IDLE else len(self.new_tokens[i]) for i in self.owners.owner]
        room = np.where(self.idle, 0, self.max_new_tokens - np.array(length))
        self._room = self._put(room.astype(np.int32), self._at.batch)

    def _warm_up(self, ends: Array) -> None:
        """Compile and time the verifications of all sizes; they change nothing."""
        self._rest()  # compiles its program as well
        tokens = self._steps.begin(self.drawn, size=size_of(self._length.most))
        drafted = Drafted(tokens, 0, self.drawn, self.owners.owner, [], [])
        for size in self._length.sizes:
            for _ in range(2):
                began = time.perf_counter()
                judged = self._judge(drafted, ends, warm_up=size)
                self._commit(judged, judged.verdict.count)
                jax.block_until_ready(self.cache.lengths)
                seconds = time.perf_counter() - began
            self._log_probs_of(judged)
            self._length.time_verification(size, seconds)

    def _time_draft(self, drafted: Drafted) -> None:
        """Wait for a draft and record its time.

        The verification is not dispatched yet: its dispatch may wait for the device.
        """
        drafted.newest.block_until_ready()
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        if self._compiled is not None:
            self._length.time_draft(drafted.count, seconds)
            self._tally.seconds[0] += seconds

    def _time_verification(self, judged: Judged) -> None:
        """Wait for a verification and record its time, before the next draft is dispatched."""
        judged.verdict.count.block_until_ready()
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        if self._compiled is None:
            self._compiled = compilations()
            return
        self._length.time_verification(self._length.size(judged.drafted.count), seconds)
        self._tally.seconds[1] += seconds

    @property
    def decode_steps(self) -> int:
        return len(self.counts)

    def stats(self) -> LosslessStats:
        """Return the statistics of the generation so far."""
        base, tally, decoder = stats_of(self), self._tally, self.decoder
        fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)}
        row = decoder.row_format.width * decoder.row_format.storage.itemsize
        rows = tally.cached * decoder.config.num_kv_heads * decoder.host_layers
        fields["host_to_device_bytes_per_token"] += rows * row / max(1, tally.new)
        return LosslessStats(
            **fields,
            acceptance_rate=tally.accepted / max(1, tally.drafted),
            tokens_per_verification=tally.new / max(1, tally.verifications),
            draft_tokens=tally.drafted / max(1, tally.verifications),
            draft_seconds=tally.seconds[0],
            verification_seconds=tally.seconds[1],
        )


def make_run(runtime: Runtime, *arguments: Any, **options: Any) -> Run:
    """Return the run of a runtime; arguments are those of `Run`."""
    kind = LosslessRun if runtime.settings.lossless else Run
    return kind(runtime, *arguments, **options)
