"""Answers in the JSON of OpenAI's interface, whole and as the parts of a stream."""

import abc
import base64
import functools
import secrets
import time
from collections.abc import Sequence
from typing import Any

from infinigen_jax.server.answer import Piece, TokenScore
from infinigen_jax.server.job import Job, tokens_per_second
from infinigen_jax.server.protocol import ChatCompletion, Completion, Generating


class Wire(abc.ABC):
    """Response to one request."""

    kind = ""
    part_kind = ""
    prefix = ""

    def __init__(
        self, model: str, body: Generating, tokenizer: Any, encoded: Sequence[Sequence[int]]
    ):
        self.body, self._tokenizer, self._encoded = body, tokenizer, encoded
        self._frame = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        count = len(encoded) * body.answers
        self._texts, self._finishes = [""] * count, [""] * count
        self._scores: list[list[TokenScore]] = [[] for _ in range(count)]
        self._text = functools.cache(functools.partial(_alone, tokenizer))

    def number(self, prompt: int, choice: int) -> int:
        """Return the index of a choice among the choices of all prompts."""
        return prompt * self.body.answers + choice

    def add(self, prompt: int, piece: Piece) -> None:
        number = self.number(prompt, piece.choice)
        self._texts[number] += piece.text
        self._scores[number] += piece.scores
        self._finishes[number] = piece.finish or ""

    def whole(self, jobs: list[Job]) -> dict[str, Any]:
        choices = [self._choice(number, self._texts[number]) for number in range(len(self._texts))]
        for number, choice in enumerate(choices):
            choice["logprobs"] = self._log_probs(self._scores[number])
            choice["finish_reason"] = self._finishes[number]
        return {"object": self.kind, **self._frame, "choices": choices, **usage(jobs)}

    def opening(self) -> list[dict[str, Any]]:
        """Return the parts of a stream that precede the first token."""
        none = {"logprobs": None, "finish_reason": None}
        parts = [self._part([choice | none]) for choice in self._beginnings()]
        if not self.body.heat_map:
            return parts
        texts = [self._text(token) for token in self._encoded[0]]
        return [self._part([]) | {"infinigen": {"prompt": texts}}, *parts]

    def part(self, prompt: int, piece: Piece) -> dict[str, Any] | None:
        """Return a part of a stream; None if the piece is empty."""
        if not (piece.text or piece.scores or piece.finish or self.body.heat_map):
            return None
        choice = self._delta(self.number(prompt, piece.choice), piece.text)
        choice["logprobs"] = self._log_probs(piece.scores)
        choice["finish_reason"] = piece.finish
        part = self._part([choice])
        if self.body.heat_map:
            part["infinigen"] = {"token": self._text(piece.token)} | _heat(piece)
        return part

    def usage_part(self, jobs: list[Job]) -> dict[str, Any]:
        """Return the part of a stream that has the usage."""
        return self._part([]) | usage(jobs)

    def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        part = {"object": self.part_kind, **self._frame, "choices": choices}
        return part | {"usage": None} if self.body.with_usage else part

    @abc.abstractmethod
    def _beginnings(self) -> list[dict[str, Any]]:
        """Return the part of each answer that precedes its first token, if there is one."""

    @abc.abstractmethod
    def _choice(self, number: int, text: str) -> dict[str, Any]:
        """Return the whole answer with a number."""

    @abc.abstractmethod
    def _delta(self, number: int, text: str) -> dict[str, Any]:
        """Return a part of the answer with a number."""

    @abc.abstractmethod
    def _log_probs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens, if requested."""


def _alone(tokenizer: Any, token: int) -> str:
    """Return a token's text after another token: a space at the start may be stripped."""
    return tokenizer.decode([token, token])[len(tokenizer.decode([token])) :]


class CompletionWire(Wire):
    """Response of /v1/completions."""

    kind = part_kind = "text_completion"
    prefix = "cmpl"
    body: Completion

    def _choice(self, number: int, text: str) -> dict[str, Any]:
        return {"index": number, "text": self._echo(number) + text}

    def _delta(self, number: int, text: str) -> dict[str, Any]:
        return {"index": number, "text": text}

    def _beginnings(self) -> list[dict[str, Any]]:
        numbers = range(len(self._texts)) if self.body.echo else ()
        return [self._choice(number, "") for number in numbers]

    def _echo(self, number: int) -> str:
        if not self.body.echo:
            return ""
        prompt = self.body.prompts[number // self.body.answers]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _log_probs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if self.body.top is None:
            return None
        return {
            "tokens": [self._text(score.token) for score in scores],
            "token_logprobs": [score.choice.log_prob for score in scores],
            "top_logprobs": [self._top(score) for score in scores] if self.body.top else None,
            "text_offset": [score.offset for score in scores],
        }

    def _top(self, score: TokenScore) -> dict[str, float]:
        """Return the likeliest tokens, best first, and the drawn one."""
        top: dict[str, float] = {}
        drawn = score.token, score.choice.log_prob
        for token, value in (*score.choice.top[: self.body.top], drawn):
            top.setdefault(self._text(token), value)  # of equal texts, the likeliest
        return top


class ChatWire(Wire):
    """Response of /v1/chat/completions."""

    kind, part_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"
    body: ChatCompletion

    def _choice(self, number: int, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": number, "message": message}

    def _delta(self, number: int, text: str) -> dict[str, Any]:
        return {"index": number, "delta": {"content": text} if text else {}}

    def _beginnings(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": number, "delta": delta} for number in range(len(self._texts))]

    def _log_probs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        if self.body.top is None:
            return None
        entries = []
        for score in scores:
            top = [self._entry(*pair) for pair in score.choice.top[: self.body.top]]
            drawn = self._entry(score.token, score.choice.log_prob)
            entries.append(drawn | {"top_logprobs": top})
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, log_prob: float) -> dict[str, Any]:
        text = self._text(token)
        whole = "\ufffd" not in text
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode()) if whole else None}


def _heat(piece: Piece) -> dict[str, Any]:
    """Return the heat map of a piece: one byte for each layer and token, in base64."""
    if piece.heat is None:
        return {}
    layers, tokens = piece.heat.shape
    heads = base64.b64encode(piece.heat.tobytes()).decode()
    return {"heads": heads, "layers": layers, "tokens": tokens}


def usage(jobs: list[Job]) -> dict[str, Any]:
    """Return the usage of a request's jobs, and this server's measurements."""
    prompt = sum(len(job.tokens) for job in jobs)
    new = sum(job.new_tokens for job in jobs)
    cached = sum(job.cached_tokens for job in jobs)
    return {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
        "infinigen": {
            "fetched_fraction": sum(job.fetched_fraction for job in jobs) / len(jobs),
            "tokens_per_second": tokens_per_second(jobs),
        },
    }
