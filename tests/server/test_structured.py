"""Answers that follow a JSON schema, tools, and refused parameters, through OpenAI's client."""

import concurrent.futures
import json
import re
import threading
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from serving import LONG, PROMPT, TEMPLATE, Served, refusal

from infinigen_jax.loading.load import embedded
from infinigen_jax.server.batch import allowed_tokens
from infinigen_jax.server.prompts import Grammars
from infinigen_jax.server.protocol import Message
from infinigen_jax.server.wire import Wire
from infinigen_jax.text.tokenizer import load_tokenizer

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = [{"type": "function", "function": WEATHER}]
NAME = {"type": "string", "maxLength": 12}
AGES = {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 2}
FIELDS = {"name": NAME, "kind": {"enum": ["old", "new"]}, "ages": AGES}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["name", "kind", "ages"]}
SCHEMA |= {"additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5, "seed": 1, "presence_penalty": 1}])
def test_answers_follow_a_schema(served: Served, sampling):
    """Next to them, free answers stay as they are, and nothing is compiled."""
    expected = served.expected([PROMPT], max_new_tokens=100, ignore_eos=True).texts[0]
    before = served.scheduler.late_compilations
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        extra = {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
        free = pool.submit(served.complete, PROMPT, **extra)
        answer = served.chat(n=2, response_format=FORMAT, **sampling)
        assert free.result().choices[0].text == expected
    for choice in answer.choices:
        content = json.loads(choice.message.content)
        assert choice.finish_reason == "stop" and len(content["name"]) <= 12
        assert content["kind"] in ("old", "new") and max(content["ages"], default=0) <= 99
        assert len(content["ages"]) <= 2 and len(content) == 3
    assert served.scheduler.late_compilations == before


@pytest.mark.parametrize("less", [1, 40, -40])
def test_a_tokenizer_may_have_another_size_than_the_model(less):
    """Gemma 3's has a token for images that the model of texts lacks."""
    tokenizer = load_tokenizer(embedded())
    size = tokenizer.backend.get_vocab_size()
    schema = {"type": "integer", "minimum": 1, "maximum": 3}
    masks = []
    for vocabulary in (size, size - less):
        matcher = Grammars(tokenizer, vocabulary, frozenset([2])).matcher(schema)
        mask = allowed_tokens({1: matcher}, 2, vocabulary)
        assert mask.shape == (2, -(-vocabulary // 32)) and (mask[0] == -1).all()
        bits = np.unpackbits(mask[1].view(np.uint8), bitorder="little")
        masks.append(np.flatnonzero(bits[:vocabulary]).tolist())
    assert masks[0] == masks[1]
    assert {tokenizer.decode([token]) for token in masks[0]} == {"1", "2", "3"}


@pytest.mark.parametrize(("kind", "name"), [(Grammars, "matcher"), (Wire, "whole")])
def test_what_takes_long_holds_up_no_other_request(served: Served, monkeypatch, kind, name):
    """The automaton of a schema, and a whole answer with its log-probabilities."""
    began, ended = threading.Event(), threading.Event()
    work = getattr(kind, name)

    def slow(*arguments: Any) -> Any:
        began.set()
        assert ended.wait(60)
        return work(*arguments)

    monkeypatch.setattr(kind, name, slow)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.chat, response_format={"type": "json_object"})
        assert began.wait(60)
        assert list(served.chat(stream=True)) and not waiting.done()
        ended.set()
        assert waiting.result().choices


def test_json_objects(served: Served):
    parts = list(served.chat(stream=True, response_format={"type": "json_object"}, max_tokens=30))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    assert text.lstrip().startswith("{")
    if parts[-1].choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_a_schema_beyond_the_limits_ends_the_request(served: Served, monkeypatch):
    def limited(grammars: Grammars, schema: Any) -> LLMatcher:
        grammar = LLMatcher.grammar_from_json_schema(schema)
        return LLMatcher(grammars._tokens, grammar, limits=LLParserLimits(max_lexer_states=20))

    monkeypatch.setattr(Grammars, "matcher", limited)
    error = refusal(served.chat, response_format=FORMAT)
    assert error["param"] == "response_format" and "too many states" in error["message"]
    served.wait(lambda: not served.metric("infinigen_running_answers"))


def called(arguments: str, name: str = "f") -> dict[str, Any]:
    """A message that calls a tool."""
    function = {"name": name, "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


# An automaton of their least common multiple takes minutes.
FACTORS = [
    [{"type": "number", "multipleOf": n} for n in pair] for pair in ((997.0, 991), (9.97, 9.91))
]
CHAIN = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}]} for i in range(4000)}
WRONG_SCHEMAS = [
    *({"type": "nonsense"}, {"not": {}}, {"$ref": "#/a"}, {"multipleOf": 99_991}),
    *({"allOf": both, "default": {"multipleOf": 0}} for both in FACTORS),
    {"multipleOf": True},
    {"allOf": [{"multipleOf": 10**4000 + i} for i in range(900)]},
    {"$ref": "#/$defs/a0", "$defs": CHAIN | {"a4000": {}}},  # overflows llguidance's stack
]
WRONG_FORMATS: list[dict[str, Any]] = [
    {"type": "yaml"},
    {"type": "json_object", "json_schema": {"name": "x"}},
    {"type": "json_schema"},
    *({"type": "json_schema", "json_schema": {"name": "x", "schema": s}} for s in WRONG_SCHEMAS),
]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
VALUES: dict[str, Any] = {"temperature": 1e9, "top_p": 0, "n": 99, "logprobs": 21, "suffix": "x"}
VALUES |= {"logit_bias": {"1": 5}, "best_of": 2, "max_tokens": 0, "prompt": ""}
VALUES |= {"stream_options": {"include_usage": True}}
OF_COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {name: value}) for name, value in VALUES.items()),
    ("temperature: Input should be greater than or equal to 0", {"temperature": -1}),
    ("echo", {"echo": True, "logprobs": 1}),
    ("new", {"extra_body": {"new": 1}}),
    ("budget", {"extra_body": {"budget": 0.9}}),
    ("heat_map", {"prompt": [PROMPT, LONG], "stream": True, "extra_body": {"heat_map": True}}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    *((start, {"prompt": PROMPT} | settings) for start, settings in OF_COMPLETIONS),
    *(("response_format", {"response_format": wrong}) for wrong in WRONG_FORMATS),
    ("response_format", {"response_format": FORMAT, "extra_body": {"ignore_eos": True}}),
    ("tools", {"tools": [{"type": "function", "function": {"description": "no name"}}]}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "required"}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("messages", {"messages": [called("[" * 100_000)]}),
    ("messages.0.tool_calls.0.function.arguments: not the text", {"messages": [called("{")]}),
    ("messages.0.content.0.type: Input should be 'text'", {"text": [IMAGE]}),
    ("messages.0.content: Input should be a valid string", {"text": 1}),
    ("messages: 5000000 characters exceed the context", {"text": "x" * 5_000_000}),
    ("stop: List should have at most 16 items", {"stop": ["x"] * 17}),
]


@pytest.mark.parametrize(("start", "settings"), REFUSED)
def test_refused_parameters_are_named(served: Served, start, settings):
    error = refusal(served.complete if "prompt" in settings else served.chat, **settings)
    assert error["param"] == re.split("[.:]", start)[0]
    assert error["message"].startswith(start) if ":" in start else start in error["message"]


def test_tools_go_to_the_template(served: Served):
    """Calls in earlier messages too; without tools, and with the choice none, it gets none."""
    messages = [
        {"role": "user", "content": "Hello"},
        called('{"place": "Rome"}', "weather"),
        {"role": "tool", "tool_call_id": "1", "content": "warm"},
    ]
    text = "<user> Hello\n<assistant> [weather Rome]\n<tool> warm\n<assistant>"

    def length(**settings: Any) -> int:
        return served.chat(messages=messages, max_tokens=1, **settings).usage.prompt_tokens

    def expected(prompt: str) -> int:
        return len(served.engine.model.tokenizer.encode(prompt, add_special_tokens=False))

    assert length(tools=TOOLS) == expected("[weather]" + text)
    assert length(tools=TOOLS, tool_choice="none") == length() == expected(text)
    messages[1] = called("")
    assert length() == expected(text.replace("weather Rome", "f "))
    extra = {"chat_template_kwargs": {"enable_thinking": True, "messages": []}}
    assert length(extra_body=extra) == expected("(thinks)" + text.replace("weather Rome", "f "))


def test_an_empty_list_of_calls_is_none():
    message = Message(role="assistant", content="x", tool_calls=[])
    assert message.for_template() == {"role": "assistant", "content": "x"}


def test_templates_get_parameters_of_every_tool(served: Served, monkeypatch):
    template = "{{ tools[0].function.parameters.properties | tojson }}" + TEMPLATE
    monkeypatch.setattr(served.engine.model.tokenizer, "chat_template", template)
    assert served.chat(tools=[{"type": "function", "function": {"name": "f"}}], max_tokens=1)


def test_tools_need_a_template_with_tools(served: Served, monkeypatch):
    template = TEMPLATE.replace("tools", "others")
    monkeypatch.setattr(served.engine.model.tokenizer, "chat_template", template)
    assert refusal(served.chat, tools=TOOLS)["param"] == "tools"
