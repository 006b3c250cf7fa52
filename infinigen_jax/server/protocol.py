"""Checked requests of OpenAI's interface; unsupported parameters that matter are refused.

The first error of a list ends its check: an error for each of a million items would take minutes.
"""

import json
from typing import Annotated, Any, Literal, LiteralString

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from infinigen_jax.settings.sampling import MOST_LOG_PROBS, Sampling
from infinigen_jax.settings.setting import options_of

MOST_ANSWERS = 8
MOST_STOPS = 16

MOST_NAME = 100  # characters of an unknown name in the error
UNSUPPORTED: LiteralString = "this parameter is not supported"
# Parameters that only their neutral value is accepted for.
NEUTRAL = ("best_of", "logit_bias", "modalities", "suffix")
Tokens = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Stop = str | Annotated[list[str], Field(max_length=MOST_STOPS)]


class Strict(BaseModel, protected_namespaces=()):
    """Request or part of one, without fields of other names; null counts as absent."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        given = {name: value for name, value in given.items() if value is not None}
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            name = unknown[:MOST_NAME].encode(errors="replace").decode()  # a lone surrogate
            raise PydanticCustomError("unsupported", UNSUPPORTED, {"name": name})
        return given


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Schema(Strict):
    """JSON schema of an answer; `strict` changes nothing, as every schema is enforced."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] = Field({}, alias="schema")
    strict: bool | None = None


class Format(Strict):
    """Format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "Format":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("give json_schema with the type json_schema, and only then")
        return self


class Generating(Strict):
    """Parameters that both kinds of completions share.

    Settings of `Sampling` have its names and limits. Parameters in NEUTRAL are accepted with their
    neutral value alone; those that cannot change an answer, such as `user`, with any.
    """

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = None
    top_k: Annotated[int, AfterValidator(lambda k: 0 if k == -1 else k)] | None = Field(
        None, description="0 or -1 for all"
    )
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: Annotated[int, AfterValidator(lambda n: None if n == -1 else n % 2**32)] | None = Field(
        None, description="-1 or absent for a random one"
    )
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-text token")
    budget: float | None = Field(
        None, gt=0, le=1, description="Rows fetched at most, as a share of those cached"
    )
    lossless: bool | None = Field(None, description="As the server: verified by the full cache")
    heat_map: bool | None = Field(None, description="Stream which cached tokens each token fetched")
    user: str | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings; none of them empty."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    @property
    def answers(self) -> int:
        """Number of answers for each prompt."""
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        """Whether the last part of a stream has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @field_validator(*options_of(Sampling))
    @classmethod
    def _check_sampling(cls, value: Any, field: ValidationInfo) -> Any:
        check = options_of(Sampling)[str(field.field_name)].check
        if value is not None and check is not None and (problem := check.problem(value)):
            raise ValueError(problem)
        return value

    @model_validator(mode="after")
    def _check_stream(self) -> "Generating":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        if self.heat_map and not (self.stream and self.answers == 1):
            raise ValueError("heat_map: only with stream, and one answer")
        return self


class Completion(Generating):
    """Body of /v1/completions."""

    prompt: str | Tokens | Annotated[list[str | Tokens], Field(min_length=1, fail_fast=True)]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOG_PROBS)
    echo: bool | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids."""
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    @property
    def top(self) -> int | None:
        """Number of most likely tokens to report for each token; None to report nothing."""
        return self.logprobs

    @model_validator(mode="after")
    def _check_prompts(self) -> "Completion":
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: not with logprobs")
        if self.heat_map and len(self.prompts) > 1:
            raise ValueError("heat_map: only with one prompt")
        return self


def _parsed(arguments: Any) -> Any:
    """Return the arguments of a call, which clients send as the text of a JSON object, or none."""
    try:
        return json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not the text of a JSON object ({error})") from None


class TextPart(BaseModel):
    """Part of a message; only text. Further fields change no text."""

    type: Literal["text"]
    text: str


class Function(BaseModel, extra="allow"):
    """Function of a tool, or a call of one."""

    name: str


class Tool(Strict):
    """Tool that the model may call."""

    type: Literal["function"]
    function: Function


class Called(Function):
    """Call of a function; templates get the arguments as an object."""

    arguments: Annotated[dict[str, Any], BeforeValidator(_parsed)]


class ToolCall(BaseModel, extra="allow"):
    """Call of a tool in an earlier message."""

    type: Literal["function"] = "function"
    function: Called


class Message(BaseModel, extra="allow"):
    """Message of a chat; further fields, such as `tool_call_id`, go to the model's template."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: (
        Annotated[list[ToolCall], Field(fail_fast=True), AfterValidator(lambda x: x or None)] | None
    ) = None

    def for_template(self) -> dict[str, Any]:
        """Return the message with its content as one text."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text or ())
        return self.model_dump(exclude_none=True) | {"content": text}


class ChatCompletion(Generating):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOG_PROBS)
    response_format: Format | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = Field(None, description="Ignored: calls are text")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="For the template")
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """JSON schema that the answer follows; None for any text."""
        if self.response_format is None or self.response_format.type == "text":
            return None
        given = self.response_format.json_schema
        return {"type": "object"} if given is None else given.json_schema

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatCompletion":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        if self.schema_of_answer is not None and self.ignore_eos:
            raise ValueError("response_format: not with ignore_eos")
        return self


Body = Completion | ChatCompletion
