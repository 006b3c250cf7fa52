"""Prompts of requests: encoded, checked against the context, made into jobs; and their schemas."""

import functools
import math
import secrets
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.live_batch import budget_limit
from infinigen_jax.errors import InputError
from infinigen_jax.server.answer import Job, RefusedError
from infinigen_jax.server.limits import Limits
from infinigen_jax.server.protocol import Body, ChatCompletion, Completion
from infinigen_jax.settings.sampling import Sampling
from infinigen_jax.settings.setting import options_of
from infinigen_jax.text.tokenizer import render_chat

NORMALISED = 4  # characters that a normaliser may make one
NO_PARAMETERS = {"type": "object", "properties": {}}
MAX_TOKENS = 16  # of a completion, as in OpenAI's interface
MOST_MULTIPLE = 50_000  # an automaton has as many states
MOST_PARTS = 1000  # llguidance recurses into them, on a stack of 8 MiB
# White space between two parts. Without a limit, a model may write it until `max_tokens`.
SPACES = r"[ \n]{0,12}"


class Prompts:
    """Encoder of a server's requests; it raises RefusedError for those that cannot be served."""

    def __init__(self, engine: Engine, limits: Limits):
        model = engine.model
        self.tokenizer: Any = model.tokenizer
        self._engine, self._limits, self._context = engine, limits, limits.context
        # No text of more characters fits the context: encoding a very long one takes minutes.
        longest = max(map(len, self.tokenizer.backend.get_vocab()), default=1)
        self._most_characters = NORMALISED * longest * limits.context
        self._lossless = engine.runtime.settings.lossless
        self._most_budget = budget_limit(engine.decoder)
        self._grammars = Grammars(self.tokenizer, model.config.vocab_size, model.eos_ids)

    def completion(self, body: Completion) -> list[list[int]]:
        return [self._checked(prompt, body, "prompt") for prompt in body.prompts]

    def chat(self, body: ChatCompletion) -> list[int]:
        """Return the tokens of a chat, rendered by the model's template."""
        template = self.tokenizer.chat_template
        if not template:
            problem = "this model has no chat template; use /v1/completions"
            raise RefusedError(problem, "messages")
        messages: list[Any] = [message.for_template() for message in body.messages]
        if "developer" not in template:  # most templates ignore roles that they do not know
            for message in messages:
                if message["role"] == "developer":
                    message["role"] = "system"
        offered = () if body.tool_choice == "none" else body.tools or ()
        tools = [tool.model_dump() for tool in offered] or None
        for tool in tools or ():
            function = tool["function"]  # templates read the parameters of each
            function["parameters"] = function.get("parameters") or NO_PARAMETERS
        if tools and "tools" not in template:
            raise RefusedError("this model's chat template has no place for them", "tools")
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        try:
            given = self.tokenizer.special_tokens, tools, body.chat_template_kwargs
            text = render_chat(template, messages, *given)
            self._check_length(len(text), "messages")
            tokens = self.tokenizer.encode(text, add_special_tokens=False)
        except InputError as error:
            raise RefusedError(str(error).partition("; give another")[0], "messages") from None
        return self._checked(tokens, body, "messages")

    def _checked(self, prompt: str | list[int], body: Body, param: str) -> list[int]:
        self._check_options(body)
        if isinstance(prompt, str):
            self._check_length(len(prompt), param)
        try:
            tokens = self._engine.encode(prompt)
        except InputError as error:
            problem = getattr(error, "problem", str(error))  # without the library's name for it
            raise RefusedError(problem, param) from None
        most = most_tokens(body) or 1
        if len(tokens) + most > self._context:
            sizes = f"{len(tokens)} tokens and {most} new ones"
            raise self._too_long(sizes, param, " or lower max_tokens")
        return tokens

    def _check_length(self, characters: int, param: str) -> None:
        if characters > self._most_characters:
            raise self._too_long(f"{characters} characters", param)

    def _too_long(self, sizes: str, param: str, remedy: str = "") -> RefusedError:
        problem = f"{sizes} exceed the context of {self._context} tokens; shorten the prompt"
        return RefusedError(problem + remedy, param, code="context_length_exceeded")

    def _check_options(self, body: Body) -> None:
        if body.heat_map and not self._limits.heat_maps:
            raise RefusedError("this server makes none", "heat_map")
        if body.lossless not in (None, self._lossless):
            kind, other = ("is", "without") if self._lossless else ("is not", "with")
            problem = f"this server {kind} lossless; leave it out, or use one {other} --lossless"
            raise RefusedError(problem, "lossless")
        most = self._most_budget
        if body.budget is not None and (most is None or body.budget > most):
            remedy = "leave it out" if most is None else f"give at most {most:g}, the server's"
            raise RefusedError(remedy, "budget")

    def jobs(
        self, body: Body, encoded: list[list[int]], matcher: LLMatcher | None = None
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
        if self._lossless:
            problem = "not on a lossless server, which drafts; leave it out"
            raise RefusedError(problem, "response_format")
        try:
            return self._grammars.matcher(schema)
        except ValueError as error:
            raise RefusedError(str(error), "response_format") from None


def most_tokens(body: Body) -> int | None:
    """Return the maximum number of new tokens; None for all that the context has room for."""
    if isinstance(body, ChatCompletion):
        return body.max_completion_tokens or body.max_tokens
    return body.max_tokens or MAX_TOKENS


def sampling_of(body: Body) -> Sampling:
    """Return the sampling settings of a request; without a seed, a random one."""
    settings: dict[str, Any] = {"temperature": 1.0, "seed": secrets.randbits(32)}
    given = {name: getattr(body, name) for name in options_of(Sampling)}
    return Sampling(**settings | {name: x for name, x in given.items() if x is not None})


class Grammars:
    """Grammars over the tokens of a model, for answers that follow a JSON schema."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]):
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends

    def matcher(self, schema: Mapping[str, Any]) -> LLMatcher:
        """Return a matcher of texts that follow a JSON schema; raise ValueError if unsupported."""
        _check_size(schema)
        options: Any = {"whitespace_pattern": SPACES}
        grammar = LLMatcher.grammar_from_json_schema(dict(schema), defaults=options)
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        return matcher

    @functools.cached_property
    def _tokens(self) -> LLTokenizer:
        backend = self._tokenizer.backend
        # Tokenizers may have tokens that the model lacks.
        size = max(self._vocabulary, backend.get_vocab_size())
        return LLTokenizer(backend.to_str(), n_vocab=size, eos_token=sorted(self._ends) or None)


def _check_size(schema: Any) -> None:
    """Refuse schemas that take llguidance too much time, memory or stack."""
    parts, count, multiples = [schema], 0, [Decimal(1)]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            count += 1
            if count > MOST_PARTS:
                raise ValueError(f"the schema has more than {MOST_PARTS} parts; simplify it")
            multiple: Any = part.get("multipleOf")
            if type(multiple) in (int, float) and 0 < multiple < math.inf:
                multiples.append(Decimal(str(multiple)))
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    # All may apply to one number. Of decimals, the last digits of all count.
    digits = max(-int(multiple.as_tuple().exponent) for multiple in multiples)
    common = 1
    for multiple in multiples[1:]:
        common = math.lcm(common, int(multiple.scaleb(digits)))
        if common > MOST_MULTIPLE:  # before it becomes a number of millions of digits
            problem = "the least common multiple of all multipleOf, in their last digit, exceeds"
            raise ValueError(f"{problem} {MOST_MULTIPLE}; use simpler ones")
