"""Answers in the JSON of OpenAI's interface, whole and as the parts of a stream."""

import base64
import functools
import secrets
import time
from collections.abc import Sequence
from typing import Any

from infinigen_jax.server.answer import Job, Piece, TokenScore, tokens_per_second
from infinigen_jax.server.protocol import Body, Completion


class Wire:
    """Response to one request, of a completion or a chat."""

    def __init__(self, model: str, body: Body, tokenizer: Any, encoded: Sequence[Sequence[int]]):
        self.body, self._tokenizer, self._encoded = body, tokenizer, encoded
        prefix, self._kind, self._part_kind = (
            ("cmpl", "text_completion", "text_completion")
            if isinstance(body, Completion)
            else ("chatcmpl", "chat.completion", "chat.completion.chunk")
        )
        number, created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self._frame = {"id": number, "created": created, "model": model}
        count = len(encoded) * body.answers
        self._texts, self._finishes = [""] * count, [""] * count
        self._scores: list[list[TokenScore]] = [[] for _ in range(count)]
        self._text = functools.cache(functools.partial(_alone, tokenizer))

    def add(self, prompt: int, piece: Piece) -> None:
        number = prompt * self.body.answers + piece.choice
        self._texts[number] += piece.text
        self._scores[number] += piece.scores
        self._finishes[number] = piece.finish or ""

    def whole(self, jobs: list[Job]) -> dict[str, Any]:
        choices = [
            self._scored(self._choice(i, text), self._scores[i], self._finishes[i])
            for i, text in enumerate(self._texts)
        ]
        return {"object": self._kind, **self._frame, "choices": choices, **usage(jobs)}

    def opening(self) -> list[dict[str, Any]]:
        """Return the parts of a stream that precede the first token."""
        numbers, body = range(len(self._texts)), self.body
        if isinstance(body, Completion):
            choices = [self._choice(number, "") for number in numbers] if body.echo else []
        else:
            delta = {"role": "assistant", "content": ""}
            choices = [{"index": number, "delta": delta} for number in numbers]
        none = {"logprobs": None, "finish_reason": None}
        parts = [self._part([choice | none]) for choice in choices]
        if not body.heat_map:
            return parts
        texts = [self._text(token) for token in self._encoded[0]]
        return [self._part([]) | {"infinigen": {"prompt": texts}}, *parts]

    def part(self, prompt: int, piece: Piece) -> dict[str, Any] | None:
        """Return a part of a stream; None if the piece is empty."""
        if not (piece.text or piece.scores or piece.finish or self.body.heat_map):
            return None
        choice = self._choice(prompt * self.body.answers + piece.choice, piece.text, part=True)
        part = self._part([self._scored(choice, piece.scores, piece.finish)])
        if self.body.heat_map:
            part["infinigen"] = {"token": self._text(piece.token)} | _heat(piece)
        return part

    def usage_part(self, jobs: list[Job]) -> dict[str, Any]:
        return self._part([]) | usage(jobs)

    def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        part = {"object": self._part_kind, **self._frame, "choices": choices}
        return part | {"usage": None} if self.body.with_usage else part

    def _choice(self, number: int, text: str, *, part: bool = False) -> dict[str, Any]:
        """Return an answer, whole or a part of it."""
        if isinstance(self.body, Completion):
            return {"index": number, "text": text if part else self._echo(number) + text}
        if part:
            return {"index": number, "delta": {"content": text} if text else {}}
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": number, "message": message}

    def _echo(self, number: int) -> str:
        if not (isinstance(self.body, Completion) and self.body.echo):
            return ""
        prompt = self.body.prompts[number // self.body.answers]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _scored(
        self, choice: dict[str, Any], scores: Sequence[TokenScore], finish: str | None
    ) -> dict[str, Any]:
        of_kind = self._by_text if isinstance(self.body, Completion) else self._by_token
        log_probs = None if self.body.top is None else of_kind(scores, self.body.top)
        return choice | {"logprobs": log_probs, "finish_reason": finish}

    def _by_text(self, scores: Sequence[TokenScore], count: int) -> dict[str, Any]:
        """Return the log-probabilities of a completion."""

        def likeliest(score: TokenScore) -> dict[str, float]:
            """Return the likeliest tokens, best first, and the drawn one."""
            top: dict[str, float] = {}
            drawn = score.token, score.choice.log_prob
            for token, value in (*score.choice.top[:count], drawn):
                top.setdefault(self._text(token), value)  # of equal texts, the likeliest
            return top

        return {
            "tokens": [self._text(score.token) for score in scores],
            "token_logprobs": [score.choice.log_prob for score in scores],
            "top_logprobs": [likeliest(score) for score in scores] if count else None,
            "text_offset": [score.offset for score in scores],
        }

    def _by_token(self, scores: Sequence[TokenScore], count: int) -> dict[str, Any]:
        """Return the log-probabilities of a chat."""

        def entry(token: int, log_prob: float) -> dict[str, Any]:
            text = self._text(token)
            code = None if "\ufffd" in text else list(text.encode())
            return {"token": text, "logprob": log_prob, "bytes": code}

        entries = []
        for score in scores:
            top = [entry(*pair) for pair in score.choice.top[:count]]
            entries.append(entry(score.token, score.choice.log_prob) | {"top_logprobs": top})
        return {"content": entries, "refusal": None}


def _alone(tokenizer: Any, token: int) -> str:
    """Return a token's text after another token: a space at the start may be stripped."""
    return tokenizer.decode([token, token])[len(tokenizer.decode([token])) :]


def _heat(piece: Piece) -> dict[str, Any]:
    """Return the heat map of a piece: one byte for each layer and token, in base64."""
    if piece.heat is None:
        return {}
    layers, tokens = piece.heat.shape
    heads = base64.b64encode(piece.heat.tobytes()).decode()
    return {"heads": heads, "layers": layers, "tokens": tokens}


def usage(jobs: list[Job]) -> dict[str, Any]:
    """Return the usage of a request's jobs, and this server's measurements."""
    prompt, new = sum(len(job.tokens) for job in jobs), sum(job.new_tokens for job in jobs)
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
