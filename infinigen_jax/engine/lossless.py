"""Lossless generation: the policy drafts, the full cache verifies (docs/lossless.md).

A `LosslessRun` and a server's `LosslessBatch` advance by the rounds of `engine.rounds`. The cache
after n tokens is that of policy full, whatever was drafted.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from infinigen_jax.decode.steps import Watch
from infinigen_jax.engine.generation import Run
from infinigen_jax.engine.live_batch import OpenBatch
from infinigen_jax.engine.results import Stats
from infinigen_jax.engine.rounds import Drafted, Given, Judged, Rounds
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.engine.sampler import Sampler
from infinigen_jax.errors import InputError
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


class LosslessRun(Run):
    """A generation that advances by rounds of drafted and verified tokens.

    A round is committed after its tokens were taken: the caller may end a conversation's turn at
    any token, and the cache must hold no later one.
    """

    def __init__(self, runtime: Runtime, *arguments: Any, **options: Any):
        super().__init__(runtime, *arguments, **options)
        self._rounds = Rounds(self, self._begun.length)
        self.draft_length = self._rounds.length
        self._open = None
        # Totals of all sequences over the rounds in which they took part.
        self._drafted = self._verifications = self._new = self._cached = 0
        self._taken = np.zeros(len(self.owner), np.int32)

    def advance(self) -> None:
        raise InputError("a lossless run advances by rounds; take its tokens from `tokens`")

    def watch(self, watch: Any, tokens: np.ndarray) -> Any:
        raise InputError("a lossless run takes no given tokens; score them without `lossless`")

    def settle(self) -> None:
        """Commit the tokens taken of an open round; other rows are on the host."""
        if self._open is not None:
            self._rounds.commit(self._open, self._rounds.put(self._taken.copy()))
            self.cached = self.cached + self._taken
            self._open = None

    def tokens(self, *, ignore_eos: bool = False) -> Iterator[list[int | None]]:
        """Yield new tokens, at most one per prompt at a time; None for prompts without one.

        The tokens of a round follow each other; a sequence that accepts fewer has None meanwhile.
        """
        eos = self._begin_taking(ignore_eos)
        ends = self._rounds.ends([*eos])
        first = self._take(np.asarray(self.drawn), eos, self._log_probs)
        self.clock.step(0)
        yield first
        yield from self._admit_prompts(eos)
        while not self.idle.all():
            warm = self._compiled is not None
            if self._left or not warm:  # the first time compiles its program
                self.rest()
            given = Given(self.drawn, self._needed(), ends, self._sampler.draws)
            if not warm and not self._rounds.length.timed:  # by an earlier turn
                scored = self._sampler if self._alternatives is not None else None
                self._rounds.warm_up(given, scored)
            judged = self._rounds.run(given, timed=warm)
            if not warm:
                self._compiled = compilations()
            yield from self._take_round(judged, self._read(judged), eos)
            self.settle()
            self.drawn = judged.verdict.last
            self._sampler.drew(judged.verdict.draws)
            yield from self._admit_prompts(eos)

    def _read(self, judged: Judged) -> np.ndarray:
        """Record a round; return the new tokens per sequence."""
        drafted, counts = judged.drafted, self._rounds.read(judged, self.owner)
        self.counts += drafted.counts
        self._record(self.owner, self.cached, drafted.count)
        active = counts > 0  # sequences without a new token took no part
        self._drafted += drafted.count * int(active.sum())
        self._verifications += int(active.sum())
        self._new += int(counts.sum())
        self._cached += int(self.cached[active].sum())
        self.clock.step(int(counts.sum()))
        return counts

    def _take_round(
        self, judged: Judged, counts: np.ndarray, eos: frozenset[int]
    ) -> Iterator[list[int | None]]:
        drawn, owner = np.asarray(judged.verdict.drawn), self.owner
        log_probs: Sequence[LogProbs | None] = [None] * drawn.shape[1]
        if self._alternatives is not None:
            log_probs = self._rounds.log_probs(judged, self._sampler)
        self._taken, self._open = np.zeros_like(counts), judged
        for place in range(int(counts.max())):
            here = (place < counts) & (self.owner == owner)
            self._taken = self._taken + here
            yield self._take(np.where(here, drawn[:, place], -1), eos, log_probs[place])

    def _admit_prompts(self, eos: frozenset[int]) -> Iterator[list[int | None]]:
        """Give idle sequences to waiting prompts, and yield their first tokens."""
        while self.waiting and self.idle.any():
            before = self.owner
            self.rest()
            self._admit()
            new = self.owner != before
            yield self._take(np.where(new, np.asarray(self.drawn), -1), eos, self._log_probs)

    def counted_steps(self, kept: np.ndarray) -> int:
        """Return the number of drafted steps, whether their tokens were accepted or not."""
        return len(self.counts)

    def stats(self) -> LosslessStats:
        fields, decoder, rounds = vars(super().stats()), self.decoder, self._verifications or 1
        row = decoder.row_format.width * decoder.row_format.storage.itemsize
        rows = self._cached * decoder.config.num_kv_heads * decoder.host_layers
        moved = fields["host_to_device_bytes_per_token"] + rows * row / max(1, self._new)
        return LosslessStats(
            **(fields | {"host_to_device_bytes_per_token": moved}),
            acceptance_rate=(self._new - self._verifications) / max(1, self._drafted),
            tokens_per_verification=self._new / rounds,
            draft_tokens=self._drafted / rounds,
            draft_seconds=self._rounds.seconds[0],
            verification_seconds=self._rounds.seconds[1],
        )


def make_run(runtime: Runtime, *arguments: Any, **options: Any) -> Run:
    """Return the run of a runtime; arguments are those of `Run`."""
    kind = LosslessRun if runtime.settings.lossless else Run
    return kind(runtime, *arguments, **options)


class Round(NamedTuple):
    """Result of a round."""

    tokens: np.ndarray  # [b, c] draws of the full model; the first `counts` are new tokens
    counts: np.ndarray
    log_probs: list[LogProbs] | None  # of the tokens of each place, if asked for
    drafted: Drafted
    cached: np.ndarray  # [b] tokens cached before


class LosslessBatch(OpenBatch):
    """Batch of a server; sequences join and leave between rounds.

    All sequences of a round draft the same number of tokens, and each accepts its own. The tokens
    of a sequence do not depend on the others, as the full model draws them. A sequence has room for
    `Runtime.draft_room` tokens after its last one, `newest`, which is not cached yet.
    """

    def __init__(self, runtime: Runtime, batch: int):
        super().__init__(runtime, batch)
        self._rounds = Rounds(self, changing=True)
        self.selecting = self._rounds.drafts
        self.newest = self._rounds.put(np.zeros(batch, np.int32))
        self._no_ends = self._rounds.ends(())

    def settle(self) -> None:
        """Do nothing: between rounds every row is on the host."""

    def round(
        self, sampler: Sampler, *, log_probs: bool = False, watch: Watch | None = None
    ) -> Round:
        """Draft and verify tokens of all sequences, wait for them, and dispatch the commit.

        Args:
            sampler: sampling of the sequences; it continues after the new tokens.
            watch: see `Dispatcher.step`, for each drafted step. Such rounds are not timed.
        """
        if self._left:
            self.rest()
        judged = self._rounds.run(self._given(sampler), timed=watch is None, watch=watch)
        verdict, cached = judged.verdict, self.cached
        counts = self._rounds.read(judged, np.where(self.active, 0, -1))
        self._rounds.commit(judged, verdict.count)
        self.newest, self.cached, self.room = verdict.last, cached + counts, self.room - counts
        sampler.drew(verdict.draws)
        values = self._rounds.log_probs(judged, sampler) if log_probs else None
        return Round(np.asarray(verdict.drawn), counts, values, judged.drafted, cached)

    def warm_up(self, sampler: Sampler, watch: Watch | None = None) -> list[tuple[Any, ...]]:
        """Compile and time the programs for the kind of draws that a sampler makes.

        Return the records of `watch`, if any.
        """
        self.rest()
        given = self._given(sampler)
        self._rounds.warm_up(given, sampler)
        self._rounds.warm_up_draft(given)
        return [] if watch is None else self._rounds.warm_up_draft(given, watch).records

    def _given(self, sampler: Sampler) -> Given:
        return Given(self.newest, self.room.copy(), self._no_ends, sampler.draws)
