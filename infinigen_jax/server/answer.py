"""Requests of clients, and the text of their answers, cut at stop strings."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher

from infinigen_jax.engine.results import Choice
from infinigen_jax.settings.sampling import Sampling
from infinigen_jax.text.detokenize import MOST_HELD, StopFilter, TextStream


class RefusedError(Exception):
    """Request that cannot be served: parameter at fault, HTTP status, OpenAI's error code."""

    def __init__(
        self, problem: str, param: str | None = None, status: int = 400, code: str | None = None
    ):
        super().__init__(problem if param is None else f"{param}: {problem}")
        self.param, self.status, self.code = param, status, code


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """Token of an answer and its place in the model's distribution, after `offset` characters."""

    token: int
    choice: Choice
    offset: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text of an answer that became final."""

    choice: int  # number of the answer within its request
    text: str
    scores: tuple[TokenScore, ...] = ()  # of tokens whose text is complete, if requested
    finish: str | None = None  # "stop" or "length" if this is the last piece
    token: int = -1
    # [l, t] KV heads, uint8, that fetched each of the t tokens before it in each selecting layer,
    # if requested.
    heat: np.ndarray | None = None


@dataclasses.dataclass(eq=False)
class Job:
    """Prompt of a request, and what has become of it."""

    tokens: list[int]
    most: int  # new tokens of each answer
    sampling: Sampling  # of each answer, with its own stream of random numbers
    answers: int
    stop: tuple[str, ...]
    ends: frozenset[int]
    matcher: LLMatcher | None  # of each answer's text, to be copied; None for any text
    top: int | None  # likeliest tokens to report for each token; None to report nothing
    budget: float | None  # see `SequenceBudgets.replace`
    heat: bool
    continues: bool  # whether the answer's text continues the prompt's, as in completions
    # Called in the scheduler's thread with each piece, or an error that ended the job.
    send: Callable[[Piece | Exception], None]
    cancelled: bool = False  # set by other threads; no piece is sent afterwards
    outcome: str = "cancelled"  # reason for `cancelled`
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


class Answer:
    """Answer in progress; `last` is the time of its last token."""

    def __init__(self, tokenizer: Any, job: Job, number: int):
        self.job, self.number = job, number
        self.tokens: list[int] = []
        self.last = 0.0
        self.matcher = None if job.matcher is None else job.matcher.deep_copy()
        context = job.tokens[-MOST_HELD:] if job.continues else ()
        self._stream, self._filter = TextStream(tokenizer, context), StopFilter(job.stop)
        self._pushed, self._sent = 0, 0  # characters before and after the filter
        self._scores: list[TokenScore] = []

    def push(
        self, token: int, choice: Choice | None = None, heat: np.ndarray | None = None
    ) -> Piece:
        """Append a token and return the text that is final; the last piece has a `finish`."""
        self.tokens.append(token)
        ended = complete = token in self.job.ends
        if self.matcher is not None and not ended:
            self.matcher.consume_token(token)
            complete = self.matcher.is_stopped() and not self.matcher.is_error()
        last = complete or len(self.tokens) == self.job.most
        if choice is not None and not ended:
            self._scores.append(TokenScore(token, choice, self._pushed))
        piece = "" if ended else self._stream.push([token])
        piece += self._stream.rest() if last else ""
        self._pushed += len(piece)
        text = self._filter.push(piece) + (self._filter.finish() if last else "")
        self._sent += len(text)
        finish = "stop" if self._filter.stopped or complete else "length" if last else None
        # Tokens without text belong to the text before them.
        whole = self._sent == self._pushed
        ready = [score for score in self._scores if whole or score.offset < self._sent]
        del self._scores[: len(ready)]
        return Piece(self.number, text, tuple(ready), finish, token, heat)
