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


def test_answers_streams_and_structured_output(served: Served):
    langchain_openai = pytest.importorskip("langchain_openai")
    url = f"http://127.0.0.1:{served.port}/v1"
    settings: dict[str, Any] = {"model": "small", "temperature": 0, "max_tokens": 40}
    model = langchain_openai.ChatOpenAI(base_url=url, api_key="x", max_retries=0, **settings)
    messages = [{"role": "system", "content": "Tell"}, {"role": "user", "content": "a story"}]
    expected = served.client.chat.completions.create(messages=messages, **settings)
    given = [("system", "Tell"), ("human", "a story")]
    answer, parts = model.invoke(given), list(model.stream(given))
    assert answer.content == expected.choices[0].message.content
    assert answer.usage_metadata["input_tokens"] == expected.usage.prompt_tokens
    assert len(parts) > 10 and "".join(part.content for part in parts) == answer.content
    model.max_tokens = 150
    book = model.with_structured_output(SCHEMA, method="json_schema").invoke("a story")
    assert len(book["name"]) <= 9 and isinstance(book["old"], bool)
