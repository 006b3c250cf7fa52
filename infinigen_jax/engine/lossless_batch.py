"""Batch of a server in lossless mode: sequences join and leave between rounds.

All sequences of a round draft the same number of tokens, and each accepts its own. The tokens of a
sequence do not depend on the others, as the full model draws them.
"""

from typing import Any, NamedTuple

import numpy as np

from infinigen_jax.decode.steps import Watch
from infinigen_jax.engine.live_batch import OpenBatch
from infinigen_jax.engine.rounds import Drafted, Given, Rounds
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.engine.sampler import Sampler
from infinigen_jax.sampling import LogProbs


class Round(NamedTuple):
    """Result of a round.

    Attributes:
        tokens: [b, c] draws of the full model; the first `counts` are new tokens.
        log_probs: log-probabilities of the tokens of each place, if asked for.
        drafted: the draft, which is computed.
        cached: [b] tokens cached before.
    """

    tokens: np.ndarray
    counts: np.ndarray
    log_probs: list[LogProbs] | None
    drafted: Drafted
    cached: np.ndarray


class LosslessBatch(OpenBatch):
    """Batch that advances by rounds of drafted and verified tokens.

    A sequence has room for `Runtime.draft_room` tokens after its last one, `newest`, which is not
    cached yet.
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
        needed = int(self.room.max())
        judged = self._rounds.run(self._given(sampler), needed, timed=watch is None, watch=watch)
        verdict, cached = judged.verdict, self.cached
        counts = self._rounds.read(judged)
        self._rounds.commit(judged, verdict.count)
        self.newest, self.cached, self.room = verdict.last, cached + counts, self.room - counts
        sampler.drew(verdict.draws, counts)
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
        room, owner = self._rounds.put(self.room.copy()), np.where(self.active, 0, -1)
        return Given(self.newest, room, self._no_ends, sampler.draws, owner)
