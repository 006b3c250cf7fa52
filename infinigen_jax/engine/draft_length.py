"""Number of tokens to draft before a verification, from measured acceptance and times.

With acceptance rate p, a round of k drafted tokens gives on average e(k) = 1 + p + ... + p^k tokens
and takes k steps of s seconds and a verification of v(k + 1). k maximises e(k) / (k s + v(k + 1)),
see docs/lossless.md; 0 drafts nothing, which is decoding with the full cache.
"""

import dataclasses
import math
from typing import NamedTuple

SIZES = (1, 4, 16)  # tokens of a verification that programs are compiled for
MOST = SIZES[-1] - 1  # most tokens drafted
KEPT = 0.9  # weight of earlier measurements, per round
START = 0.8  # acceptance rate before the first measurement, with the weight of PRIOR tokens
PRIOR = 8.0
TRIED = 2  # drafts, and verifications of a size, timed at first; the shortest time counts
STALL = 3.0  # largest ratio of a time to earlier ones; longer ones are the machine's
AGED = 0.99  # factor on a time for each round since its measurement
OLDEST = 500  # rounds after which a time ages no further: it must not become 0


def size_of(drafted: int) -> int:
    """Return the size of the program that verifies this number of drafted tokens."""
    return next(size for size in SIZES if size > drafted)


class Time(NamedTuple):
    """A time in seconds, and the round of its last measurement."""

    seconds: float
    round: int


@dataclasses.dataclass
class DraftLength:
    """Chooser of the number of drafted tokens; see the module's docstring."""

    most: int  # maximum number of tokens to draft
    # Whether a time becomes shorter with its age, so that its choice is tried again: for a batch
    # whose texts change.
    ages: bool = False

    def __post_init__(self):
        self._accepted, self._tested = START * PRIOR, PRIOR
        self._round = self._drafts = 0
        self._step: Time | None = None
        self._verification: dict[int, Time] = {}

    @property
    def sizes(self) -> list[int]:
        """Sizes of verifications that may be needed."""
        return [size for size in SIZES if size <= size_of(self.most)]

    @property
    def timed(self) -> bool:
        return bool(self._verification)

    @property
    def acceptance(self) -> float:
        """Rate at which a drafted token is accepted after accepted ones."""
        return self._accepted / self._tested

    def record(self, accepted: float, tested: int) -> None:
        """Record accepted tokens, and those compared: the accepted ones and the first rejected.

        Rounds without a draft move the rate towards its start, so that drafting is tried again.
        """
        if not tested:
            accepted, tested = START, 1
        self._accepted = KEPT * self._accepted + accepted
        self._tested = KEPT * self._tested + tested

    def time_verification(self, size: int, seconds: float) -> None:
        """Record the time of a verification, in seconds; it ends a round."""
        self._verification[size] = self._blended(self._verification.get(size), seconds)
        self._round += 1

    def time_draft(self, drafted: int, seconds: float) -> None:
        if not drafted:
            return
        self._drafts, step = self._drafts + 1, self._step
        if step is None or self._drafts <= TRIED:
            shortest = min(seconds / drafted, step.seconds if step else math.inf)
            self._step = Time(shortest, self._round)
        else:
            self._step = self._blended(step, seconds / drafted)

    def choose(self, most: int) -> int:
        """Return the number of tokens to draft, at most `most`."""
        most = min(most, self.most)
        return most if self._drafts < TRIED else self.best(most)

    def best(self, most: int) -> int:
        """Return the number of tokens with the largest rate, at most `most`."""
        return max(range(most + 1), key=self.rate)

    def rate(self, drafted: int) -> float:
        """Return the expected tokens per second."""
        p, step = min(self.acceptance, 0.999), self._aged(self._step) if self._step else 0.0
        tokens = (1 - p ** (drafted + 1)) / (1 - p)
        return tokens / (drafted * step + self._seconds(size_of(drafted)))

    def _seconds(self, size: int) -> float:
        """Return the time of a verification, or of the measured size closest to it."""
        sizes = sorted(self._verification, key=lambda n: abs(n - size))
        return self._aged(self._verification[sizes[0]])

    def _blended(self, before: Time | None, seconds: float) -> Time:
        """Return the mean of a measurement and earlier ones, whose weight falls with their age."""
        if before is None:
            return Time(seconds, self._round)
        if not self.ages:  # what ages is tried again, and may change with the texts
            seconds = min(seconds, STALL * before.seconds)
        kept = KEPT ** max(1, self._round - before.round if self.ages else 1)
        return Time(kept * before.seconds + (1 - kept) * seconds, self._round)

    def _aged(self, time: Time) -> float:
        age = min(self._round - time.round, OLDEST) if self.ages else 0
        return time.seconds * AGED**age
