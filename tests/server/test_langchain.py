"""LangChain's client against the server; left out where it is not installed."""

from typing import Any

import pytest
from serving import Served

SCHEMA = {
    "title": "book",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


@pytest.fixture
def model(served: Served) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai")
    url = f"http://127.0.0.1:{served.port}/v1"
    settings = {"temperature": 0, "max_tokens": 40, "max_retries": 0}
    return langchain_openai.ChatOpenAI(base_url=url, api_key="x", model="small", **settings)


def test_answers_and_streams(served: Served, model):
    prompt = served.engine.model.tokenizer.encode(
        "<system> Tell\n<user> a story\n<assistant>", add_special_tokens=False
    )
    expected = served.expected([prompt], max_new_tokens=40).texts[0]
    messages = [("system", "Tell"), ("human", "a story")]
    answer = model.invoke(messages)
    assert answer.content == expected
    assert answer.usage_metadata["input_tokens"] == len(prompt)
    parts = list(model.stream(messages))
    assert len(parts) > 10 and "".join(part.content for part in parts) == expected


def test_structured_output(model):
    model.max_tokens = 150
    book = model.with_structured_output(SCHEMA, method="json_schema").invoke("a story")
    assert len(book["name"]) <= 9 and isinstance(book["old"], bool)
