"""Clients of OpenAI and LangChain against the server: results equal those of `generate`."""

import base64
import concurrent.futures
import dataclasses
import itertools
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import openai
import pytest
from runtime import SPARSE
from serving import CONTEXT, LONG, PROMPT, ROWS, Served, engine_of

from infinigen_jax.engine.live_batch import LiveBatch
from infinigen_jax.sampling import Sampling


def test_completion(served: Served):
    """With parameters that are null, which is as left out."""
    names = "echo", "ignore_eos", "heat_map", "budget", "lossless", "top_k", "store", "unknown"
    expected = served.expected([PROMPT, LONG])
    answer = served.complete([PROMPT, LONG], extra_body=dict.fromkeys(names))
    assert [choice.text for choice in answer.choices] == expected.texts
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    tokens = [len(served.engine.encode(prompt)) for prompt in (PROMPT, LONG)]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (sum(tokens), 40)
    assert usage.total_tokens == sum(tokens) + 40
    assert 0 < answer.infinigen["fetched_fraction"] < 1


def test_chat(served: Served):
    messages = [{"role": "system", "content": "Tell"}, {"role": "user", "content": "a story"}]
    text = "<system> Tell\n<user> a story\n<assistant>"
    prompt = served.engine.encode(text, add_special_tokens=False)
    expected = served.expected([prompt]).texts[0]
    (choice,) = served.chat(messages=messages, max_completion_tokens=20).choices
    assert (choice.message.content, choice.message.role) == (expected, "assistant")
    parts = list(served.chat(messages=messages, max_tokens=20, stream=True))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    assert parts[0].choices[0].delta.role == "assistant"
    content = [{"type": "text", "text": "a ", "id": "1"}, {"type": "text", "text": "story"}]
    developer = {"role": "developer", "content": "Tell"}  # the template knows no such role
    messages = [developer, {"role": "user", "content": content}]
    scored = {"max_tokens": 20, "logprobs": True, "top_logprobs": 2}
    (choice,) = served.chat(messages=messages, **scored).choices
    assert choice.message.content == expected
    assert "".join(entry.token for entry in choice.logprobs.content) == expected
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 20


def test_an_answer_that_is_alone_between_others(served: Served, monkeypatch):
    """It moves between the batch of one and the whole batch, and nothing is compiled."""
    settings: dict[str, Any] = {"temperature": 0.9, "presence_penalty": 0.5, "seed": 7}
    step, sizes = LiveBatch.step, []

    def slow_step(live: LiveBatch, *arguments: Any) -> Any:
        sizes.append(len(live.active))
        time.sleep(0.01)
        return step(live, *arguments)

    expected = served.expected([PROMPT], Sampling(**settings), max_new_tokens=150, ignore_eos=True)
    other = served.expected([LONG], max_new_tokens=5).texts[0]
    extra = {"max_tokens": 150, "extra_body": {"ignore_eos": True}, "stream": True, "logprobs": 1}
    before = served.scheduler.late_compilations
    monkeypatch.setattr(LiveBatch, "step", slow_step)
    for copied in (1024, 4):  # it returns immediately, or later
        monkeypatch.setattr("infinigen_jax.server.batch.COPIED", copied)
        sizes.clear()
        parts = []
        for part in served.complete(PROMPT, **settings | extra):
            parts.append(part.choices[0].text)
            if len(parts) in (30, 80):
                assert served.complete(LONG, max_tokens=5).choices[0].text == other
        assert "".join(parts) == expected.texts[0]
        steps = [(size, len(list(group))) for size, group in itertools.groupby(sizes)]
        assert [size for size, _ in steps] == [1, ROWS, 1, ROWS, 1]
        joined = [steps[0][1], sum(count for _, count in steps[:3])]
        for (_, count), before_it in zip(steps[1::2], joined, strict=True):
            assert count >= before_it / copied
            assert copied == 4 or count < 20
    assert served.scheduler.late_compilations == before


def test_nothing_is_compiled_after_the_warm_up(served: Served, running):
    assert running[1] == 0


def test_echo_and_stream(served: Served):
    expected = PROMPT + served.expected([PROMPT]).texts[0]
    assert served.complete(PROMPT, echo=True).choices[0].text == expected
    options = {"stream": True, "stream_options": {"include_usage": True}}
    plain = served.complete(PROMPT, stream=True)
    assert PROMPT + "".join(part.choices[0].text for part in plain) == expected
    parts = list(served.complete(PROMPT, echo=True, **options))
    assert "".join(part.choices[0].text for part in parts[:-1]) == expected
    assert len(parts) > 10
    assert [part.choices[0].finish_reason for part in parts[:-1]][-1] == "length"
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 20
    assert all("usage" in part.model_fields_set and part.usage is None for part in parts[:-1])


def test_a_budget_of_a_request(served: Served):
    """It changes this request's result, not that of a neighbour, and compiles nothing."""

    def beside_another(budget: float) -> tuple[Any, Any]:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            other = pool.submit(served.complete, LONG)
            answer = served.complete(LONG, extra_body={"budget": budget})
            assert other.result().choices[0].text == usual.texts[0]
            return answer, other.result()

    policy = dataclasses.replace(SPARSE, budget=0.05)
    small = dataclasses.replace(served, engine=engine_of(served.engine.model, policy))
    expected, usual = small.expected([LONG]), served.expected([LONG])
    before = served.scheduler.late_compilations
    both = beside_another(0.05)
    assert both[0].choices[0].text == expected.texts[0]
    fetched = [answer.infinigen["fetched_fraction"] for answer in both]
    assert 0 < fetched[0] <= 0.05 < fetched[1]
    assert beside_another(1e-12)[0].choices[0].text  # no row at all
    assert served.scheduler.late_compilations == before
    assert served.complete(LONG).choices[0].text == usual.texts[0]


def test_values_that_change_nothing(served: Served):
    neutral = {"top_k": -1, "store": True, "metadata": {"a": "b"}, "logit_bias": {}}
    neutral |= {"prompt_cache_key": "x", "safety_identifier": "x", "service_tier": "flex"}
    drawn: Any = {"temperature": 1.0, "seed": 3}
    plain, same = (served.complete(PROMPT, **drawn, extra_body=x) for x in ({}, neutral))
    assert same.choices[0].text == plain.choices[0].text != ""
    extra = {"top_logprobs": 0, "parallel_tool_calls": False}
    assert served.chat(max_tokens=1, extra_body=extra).choices[0].logprobs is None


def test_the_seed_minus_one_is_a_random_one(served: Served):
    draws = {served.complete(PROMPT, temperature=1.0, seed=-1).choices[0].text for _ in range(2)}
    assert len(draws) == 2


def test_models(served: Served):
    (model,) = served.client.models.list().data
    assert (model.id, model.max_model_len) == ("small", CONTEXT)
    assert served.client.models.retrieve("small").id == "small"
    assert served.request("GET", "/v1/models/")[2] == served.request("GET", "/v1/models")[2]
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as missing:
        served.client.completions.create(model="other", prompt=PROMPT)
    assert missing.value.code == "model_not_found"


def test_a_heat_map_has_the_fetched_rows_of_each_token(served: Served):
    """They are cached tokens that are not on the device, as many as the server counts."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    parts = list(served.complete(LONG, **options, extra_body={"heat_map": True}))
    prompt, *answer, usage = (part.infinigen for part in parts)
    assert "".join(prompt["prompt"]).endswith(LONG)
    assert "".join(part.choices[0].text for part in parts[1:-1]) == served.expected([LONG]).texts[0]
    assert "heads" not in answer[0] and len(answer) == 20
    decoder, shares = served.engine.decoder, []
    heads = decoder.config.num_kv_heads
    for cached, info in enumerate(answer[1:], len(prompt["prompt"])):
        assert (info["layers"], info["tokens"]) == (decoder.host_layers, cached)
        heat = np.frombuffer(base64.b64decode(info["heads"]), np.uint8).reshape(-1, cached)
        eligible = np.asarray(decoder.slots.eligible(jnp.array([cached]), CONTEXT))[0, 0, :cached]
        assert heat.max() <= heads and not heat[:, ~eligible].any()
        shares.append(heat.sum() / (heat.size * heads))
    assert min(shares) > 0 and usage["fetched_fraction"] == pytest.approx(np.mean(shares))


def test_a_heat_map_that_would_be_too_large_is_left_out(served: Served, monkeypatch):
    """The answer goes on without."""
    begun = len(served.engine.encode(LONG))
    monkeypatch.setattr("infinigen_jax.server.batch.MOST_HEAT", begun + 3)
    options = {"stream": True, "extra_body": {"heat_map": True}}
    _, *answer = (part.infinigen for part in served.complete(LONG, **options))
    cached = [None, *range(begun, begun + 4), *[None] * 15]
    assert [info.get("tokens") for info in answer] == cached


NAME, OLD = {"type": "string", "maxLength": 9}, {"type": "boolean"}
BOOK = {"title": "book", "type": "object", "properties": {"name": NAME, "old": OLD}}
BOOK |= {"required": ["name", "old"], "additionalProperties": False}


def test_langchain(served: Served):
    """Answers, streams and structured output; left out where it is not installed."""
    langchain_openai = pytest.importorskip("langchain_openai")
    url = f"http://127.0.0.1:{served.port}/v1"
    settings: dict[str, Any] = {"model": "small", "temperature": 0, "max_tokens": 40}
    model = langchain_openai.ChatOpenAI(base_url=url, api_key="x", max_retries=0, **settings)
    expected = served.chat("a story", max_tokens=40)
    answer, parts = model.invoke("a story"), list(model.stream("a story"))
    assert answer.content == expected.choices[0].message.content
    assert answer.usage_metadata["input_tokens"] == expected.usage.prompt_tokens
    assert len(parts) > 10 and "".join(part.content for part in parts) == answer.content
    model.max_tokens = 150
    book = model.with_structured_output(BOOK, method="json_schema").invoke("a story")
    assert len(book["name"]) <= 9 and isinstance(book["old"], bool)
