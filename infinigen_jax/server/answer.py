"""Text of one answer: pieces that are final, cut at stop strings, with their log-probabilities."""

import dataclasses
from typing import Any

import numpy as np

from infinigen_jax.engine.results import Choice
from infinigen_jax.server.job import Job
from infinigen_jax.text.detokenize import MOST_HELD, TextStream
from infinigen_jax.text.stops import StopFilter


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """Token of an answer and its place in the model's distribution, after `offset` characters."""

    token: int
    choice: Choice
    offset: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """Text of an answer that became final.

    Attributes:
        choice: number of the answer within its request.
        scores: tokens whose text is complete with this piece, if requested.
        finish: "stop" or "length" if this is the last piece, else None.
        heat: [l, t] KV heads that fetched each of the t tokens before it in each selecting layer,
            uint8; None unless requested.
    """

    choice: int
    text: str
    scores: tuple[TokenScore, ...] = ()
    finish: str | None = None
    token: int = -1
    heat: np.ndarray | None = None


class Answer:
    """Answer in progress.

    `tokens` include one that ended it, `matcher` is None for any text, and `last` is the time of
    the last token.
    """

    def __init__(self, tokenizer: Any, job: Job, number: int):
        self.job, self.number = job, number
        self.tokens: list[int] = []
        self.last = 0.0
        self.matcher = None if job.matcher is None else job.matcher.deep_copy()
        context = job.tokens[-MOST_HELD:] if job.continues else ()
        self._stream, self._filter = TextStream(tokenizer, context), StopFilter(job.stop)
        self._pushed, self._sent = 0, 0  # characters before and after the filter
        self._scores: list[TokenScore] = []

    def push(self, token: int, choice: Choice | None = None) -> Piece:
        """Append a token and return the text that is final; the last piece has a `finish`."""
        self.tokens.append(token)
        ended = token in self.job.ends
        complete = ended or self._completes(token)
        last = complete or len(self.tokens) == self.job.most
        if choice is not None and not ended:
            self._scores.append(TokenScore(token, choice, self._pushed))
        piece = "" if ended else self._stream.push([token])
        piece += self._stream.finish() if last else ""
        self._pushed += len(piece)
        text = self._filter.push(piece) + (self._filter.finish() if last else "")
        self._sent += len(text)
        if self._filter.stopped or complete:
            return self._piece(text, "stop")
        return self._piece(text, "length" if last else None)

    def _completes(self, token: int) -> bool:
        if self.matcher is None:
            return False
        self.matcher.consume_token(token)
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def _piece(self, text: str, finish: str | None) -> Piece:
        begun = sum(score.offset < self._sent for score in self._scores)
        # Tokens without text belong to the text before them.
        count = len(self._scores) if self._sent == self._pushed else begun
        ready, self._scores = self._scores[:count], self._scores[count:]
        return Piece(self.number, text, tuple(ready), finish, self.tokens[-1])
