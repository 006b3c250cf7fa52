"""Requests on their way through the scheduler."""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from infinigen_jax.engine.live_batch import Reading
from infinigen_jax.server.prefix_cache import Node
from infinigen_jax.settings.sampling import Sampling

if TYPE_CHECKING:
    from infinigen_jax.server.answer import Piece


class RefusedError(Exception):
    """Request that cannot be served: parameter at fault, HTTP status, OpenAI's error code."""

    def __init__(
        self, message: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclasses.dataclass(eq=False)
class Job:
    """Request of a client.

    Attributes:
        most: maximum number of new tokens of each answer.
        sampling: sampling settings; each answer has its own stream of random numbers.
        matcher: matcher of each answer's text, to be copied; None for any text.
        top: number of most likely tokens to report for each token; None to report nothing.
        budget: see `SequenceBudgets.replace`.
        continues: whether the answer's text continues the prompt's, as in completions.
        send: called in the scheduler's thread with each piece, or an error that ended the job.
        cancelled: set by other threads; no piece is sent afterwards.
        outcome: reason for `cancelled`.
    """

    tokens: list[int]
    most: int
    sampling: Sampling
    answers: int
    stop: tuple[str, ...]
    ends: frozenset[int]
    matcher: LLMatcher | None
    top: int | None
    budget: float | None
    heat: bool
    continues: bool
    send: "Callable[[Piece | Exception], None]"
    cancelled: bool = False
    outcome: str = "cancelled"
    cached_tokens: int = 0
    read_tokens: int = 0  # of the prompt, cached ones included
    new_tokens: int = 0
    begun: int = 0  # answers with a token
    finished: int = 0
    moved: float = 0.0  # sum over steps of fetched rows over cached rows
    steps: int = 0
    arrived: float = dataclasses.field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0

    @property
    def fetched_fraction(self) -> float:
        """Fetched rows over cached rows, averaged over the steps."""
        return self.moved / max(1, self.steps)


def tokens_per_second(jobs: Sequence[Job]) -> float:
    """Return the rate of all answers together, without each one's first token.

    It is 0 without other tokens, and if all tokens came in one step or round.
    """
    later = sum(job.new_tokens - job.begun for job in jobs)
    seconds = max(job.last for job in jobs) - min(job.first or math.inf for job in jobs)
    return later / seconds if later and seconds > 0 else 0.0


@dataclasses.dataclass(eq=False)
class Intake:
    """Prompt that is read, or complete and waiting for sequences.

    `node` is that of the prefix cache at the end of the tokens read so far; `stored` are the nodes
    up to it that are still to be copied. `admitted` answers have a sequence.
    """

    job: Job
    reading: Reading | None = None
    node: Node | None = None
    stored: deque[Node] = dataclasses.field(default_factory=deque)
    admitted: int = 0

    @property
    def complete(self) -> bool:
        return self.reading is not None and self.reading.complete
