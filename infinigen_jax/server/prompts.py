"""Prompts of requests: encoded, checked against the context, and made into jobs."""

import secrets
from typing import Any

from llguidance import LLMatcher

from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.sequence_budgets import budget_limit
from infinigen_jax.errors import InputError
from infinigen_jax.server.grammar import Grammars
from infinigen_jax.server.job import Job, RefusedError
from infinigen_jax.server.limits import Limits
from infinigen_jax.server.protocol import ChatCompletion, Completion, Generating
from infinigen_jax.settings.sampling import Sampling
from infinigen_jax.settings.setting import options_of
from infinigen_jax.text.templates import render_chat

NORMALISED = 4  # characters that a normaliser may make one
NO_PARAMETERS = {"type": "object", "properties": {}}
MAX_TOKENS = 16  # of a completion, as in OpenAI's interface


class Prompts:
    """Encoder of a server's requests."""

    def __init__(self, engine: Engine, limits: Limits):
        self.tokenizer: Any = engine.model.tokenizer
        self._engine, self._context, self._heat_maps = engine, limits.context, limits.heat_maps
        self._waiting = limits.waiting
        # No text of more characters fits the context: encoding a very long one takes minutes.
        longest = max(map(len, self.tokenizer.backend.get_vocab()), default=1)
        self._most_characters = NORMALISED * longest * limits.context
        self._lossless = engine.runtime.settings.lossless
        self._most_budget = budget_limit(engine.decoder)
        model = engine.model
        self._grammars = Grammars(self.tokenizer, model.config.vocab_size, model.eos_ids)

    def completion(self, body: Completion) -> list[list[int]]:
        """Return the tokens of each prompt; raise RefusedError if one is invalid or too long."""
        if len(body.prompts) > self._waiting:
            most = f"at most {self._waiting} prompts in a request"
            raise RefusedError(f"prompt: {most}, not {len(body.prompts)}", "prompt")
        return [self._checked(prompt, body, "prompt") for prompt in body.prompts]

    def chat(self, body: ChatCompletion) -> list[int]:
        """Return the tokens of a chat, rendered by the model's template; may raise RefusedError."""
        template = self.tokenizer.chat_template
        if not template:
            raise RefusedError(
                "messages: this model has no chat template; use /v1/completions", "messages"
            )
        messages: list[Any] = [message.for_template() for message in body.messages]
        if "developer" not in template:  # most templates ignore roles that they do not know
            for message in messages:
                if message["role"] == "developer":
                    message["role"] = "system"
        tools = [tool.model_dump() for tool in body.tools_offered] or None
        for tool in tools or ():
            function = tool["function"]  # templates read the parameters of each
            function["parameters"] = function.get("parameters") or NO_PARAMETERS
        if tools and "tools" not in template:
            raise RefusedError("tools: this model's chat template has no place for them", "tools")
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        try:
            given = self.tokenizer.special_tokens, tools, body.chat_template_kwargs
            text = render_chat(template, messages, *given)
            self._check_length(len(text), "messages")
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
        except InputError as error:
            message = str(error).partition("; give another")[0]
            raise RefusedError(f"messages: {message}", "messages") from None
        return self._checked(tokens, body, "messages")

    def _checked(self, prompt: str | list[int], body: Generating, param: str) -> list[int]:
        self._check_options(body)
        if isinstance(prompt, str):
            self._check_length(len(prompt), param)
        try:
            tokens = self._engine.encode(prompt)
        except InputError as error:
            problem = getattr(error, "problem", str(error))  # without the library's name for it
            raise RefusedError(f"{param}: {problem}", param) from None
        needed = len(tokens) + (most_tokens(body) or 1)
        if needed > self._context:
            code = "context_length_exceeded"
            message = (
                f"{param}: {len(tokens)} tokens and {needed - len(tokens)} new ones exceed the "
                f"context of {self._context} tokens; shorten the prompt or lower max_tokens"
            )
            raise RefusedError(message, param, code=code)
        return tokens

    def _check_length(self, characters: int, param: str) -> None:
        if characters > self._most_characters:
            raise RefusedError(
                f"{param}: {characters} characters exceed the context of {self._context} tokens; "
                "shorten the prompt",
                param,
                code="context_length_exceeded",
            )

    def _check_options(self, body: Generating) -> None:
        if body.heat_map and not self._heat_maps:
            raise RefusedError("heat_map: this server makes none", "heat_map")
        if body.lossless not in (None, self._lossless):
            kind, other = ("is", "without") if self._lossless else ("is not", "with")
            message = f"this server {kind} lossless; leave it out, or use one {other} --lossless"
            raise RefusedError(f"lossless: {message}", "lossless")
        most = self._most_budget
        if body.budget is not None and (most is None or body.budget > most):
            remedy = "leave it out" if most is None else f"give at most {most:g}, the server's"
            raise RefusedError(f"budget: {remedy}", "budget")

    def jobs(
        self, body: Generating, encoded: list[list[int]], matcher: LLMatcher | None = None
    ) -> list[Job]:
        """Return a job for each encoded prompt; `matcher` is that of the body's schema."""
        ends = frozenset(() if body.ignore_eos else self._engine.model.eos_ids)
        return [
            Job(
                tokens=tokens,
                most=most_tokens(body) or self._context - len(tokens),
                sampling=sampling_of(body),
                answers=body.answers,
                stop=body.stops,
                ends=ends,
                matcher=matcher,
                top=body.top,
                budget=body.budget,
                heat=bool(body.heat_map),
                continues=isinstance(body, Completion),
                send=lambda piece: None,
            )
            for tokens in encoded
        ]

    def matcher(self, schema: dict[str, Any]) -> LLMatcher:
        """Return the matcher of a JSON schema; raise RefusedError if it is not supported."""
        if self._lossless:
            message = "response_format: not on a lossless server, which drafts; leave it out"
            raise RefusedError(message, "response_format")
        try:
            return self._grammars.matcher(schema)
        except ValueError as error:
            raise RefusedError(f"response_format: {error}", "response_format") from None


def most_tokens(body: Generating) -> int | None:
    """Return the maximum number of new tokens; None for all that the context has room for."""
    if isinstance(body, ChatCompletion):
        return body.max_completion_tokens or body.max_tokens
    return body.max_tokens or MAX_TOKENS


def sampling_of(body: Generating) -> Sampling:
    """Return the sampling settings of a request; without a seed, a random one."""
    settings: dict[str, Any] = {"temperature": 1.0, "seed": secrets.randbits(32)}
    given = {name: getattr(body, name) for name in options_of(Sampling)}
    return Sampling(**settings | {name: x for name, x in given.items() if x is not None})
