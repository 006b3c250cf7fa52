"""A server's answers, plain and lossless, equal those of `generate`."""

import concurrent.futures
import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from runtime import SPARSE, with_rope
from serving import CONTEXT, LONG, PROMPT, Served, engine_of, refusal, serving, small_engine

from infinigen_jax.engine.draft_length import DraftLength
from infinigen_jax.engine.live_batch import LiveBatch
from infinigen_jax.engine.lossless import LosslessBatch
from infinigen_jax.policies import Full, Policy, Quest
from infinigen_jax.sampling import Sampling

POOR = dataclasses.replace(SPARSE, budget=0.05)  # drafts that are often rejected
IGNORE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def lossless(served: Served) -> Iterator[Served]:
    """The lossless server, whose drafts have all lengths; else they depend on measured times."""
    model, counts = small_engine().model, itertools.cycle((3, 0, 1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftLength, "choose", lambda self, most: min(next(counts), most, self.most))
        with serving(engine=engine_of(model, POOR, lossless=True, draft_tokens=3)) as server:
            server.full = engine_of(model, Full(window=4, sinks=2))
            yield server


@pytest.fixture(params=["served", "lossless"])
def server(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(request.param)


def test_samples_depend_on_the_seed_alone(server: Served):
    """With penalties and several answers, next to a greedy one."""
    settings: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
    settings |= {"presence_penalty": 0.5, "frequency_penalty": 0.5}
    extra = {"top_k": 50, "min_p": 0.01}
    sampling = Sampling(**settings, **extra)
    expected = server.expected([PROMPT] * 2, sampling, ignore_eos=True).texts
    greedy = server.expected([LONG], max_new_tokens=60, ignore_eos=True).texts[0]
    before = server.scheduler.late_compilations
    names = "infinigen_first_token_seconds_count", "infinigen_token_seconds_count"
    first, further = map(server.metric, names)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        other = pool.submit(server.complete, LONG, max_tokens=60, extra_body=IGNORE)
        answer = server.complete(PROMPT, **settings, n=2, extra_body=extra | IGNORE)
        assert [choice.text for choice in answer.choices] == expected
        assert other.result().choices[0].text == greedy
    assert [*map(server.metric, names)] == [first + 3, further + 19 + 19 + 59]
    assert expected[0] != expected[1]
    assert server.complete(PROMPT, temperature=1).choices[0].text != expected[0]  # alone
    assert server.scheduler.late_compilations == before


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(server: Served, stream):
    """They end the text where they begin, also in the middle of a token."""
    expected = server.expected([PROMPT]).texts[0]
    stop = expected[9:14]
    before = expected[: expected.index(stop)]
    answer = server.complete(PROMPT, stop=[stop, "@@@"], stream=stream)
    parts = list(answer) if stream else [answer]
    assert "".join(part.choices[0].text for part in parts) == before
    assert parts[-1].choices[0].finish_reason == "stop"
    assert server.complete(PROMPT, stop="@@@").choices[0].text == expected


def test_log_probs(server: Served):
    expected = server.expected([PROMPT], log_probs=3).log_probs[0]
    answer = server.complete(PROMPT, logprobs=3).choices[0]
    values = [choice.log_prob for choice in expected]
    assert answer.logprobs.token_logprobs == pytest.approx(values, abs=1e-4)
    assert "".join(answer.logprobs.tokens) == answer.text
    assert [len(top) for top in answer.logprobs.top_logprobs] == [3] * 20
    best = [max(top.values()) for top in answer.logprobs.top_logprobs]
    assert best == pytest.approx(values, abs=1e-4)
    offsets = answer.logprobs.text_offset
    texts = zip(answer.logprobs.tokens, offsets, strict=True)
    assert all(answer.text[at : at + len(token)] == token for token, at in texts)


def test_cached_prefix(server: Served):
    """A prompt's beginning is read once; the result is the same."""
    first = server.complete(LONG + "The end", max_tokens=8)
    second = server.complete(LONG + "Then he", max_tokens=8)
    cached = second.usage.prompt_tokens_details.cached_tokens
    shared = len(server.engine.encode(LONG))
    assert shared - 64 <= cached <= shared
    texts = server.expected([LONG + "The end", LONG + "Then he"], max_new_tokens=8).texts
    assert [first.choices[0].text, second.choices[0].text] == texts
    again = server.complete(LONG + "The end" + first.choices[0].text, max_tokens=8)
    whole = len(server.engine.encode(LONG + "The end"))
    assert again.usage.prompt_tokens_details.cached_tokens in range(cached, whole + 1)


@pytest.mark.slow
def test_nothing_is_cached_where_keys_depend_on_the_prompt_s_length():
    """The base of dynamic frequencies grows with the whole prompt, beyond the original context."""
    dynamic = {"kind": "dynamic", "factor": 4.0, "original_positions": 128}
    model = with_rope(small_engine().model, **dynamic)
    tokens = model.tokenizer.encode(2 * LONG)
    cached, texts = [], []
    with serving(engine=engine_of(model, SPARSE)) as server:
        for end in (80, 100, 140):
            answer = server.complete(tokens[:end], max_tokens=8)
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
            texts.append(answer.choices[0].text)
        assert cached[0] == cached[2] == 0 < cached[1]
        assert texts[2:] == server.expected([tokens[:140]], max_new_tokens=8).texts


def load(served: Served, number: int) -> None:
    """Send requests of mixed lengths, sixteen at a time; some are malformed or left by clients."""
    words = LONG.split()
    prompts = [" ".join(words[i % 7 : i % 7 + 1 + i * i % 60]) for i in range(24)]
    expected = served.expected(prompts, max_new_tokens=24)
    compilations = served.scheduler.late_compilations
    impatient = served.client.with_options(timeout=0.05)
    endless: Any = {"max_tokens": 230, "extra_body": IGNORE}

    def one(i: int) -> None:
        prompt, most = prompts[i % 24], 1 + i % 24
        if i % 8 == 5:
            refusal(served.complete, prompt, top_p=2)
        elif i % 8 == 7:
            stream = served.complete(prompt, max_tokens=100, stream=True)
            next(iter(stream))
            stream.close()
        elif i % 8 == 3:
            with pytest.raises(openai.APITimeoutError):
                impatient.completions.create(model="small", prompt=PROMPT, **endless)
        else:
            tokens = expected.tokens[i % 24][:most]
            text = served.engine.model.tokenizer.decode(tokens, skip_special_tokens=True)
            answer = served.complete(prompt, max_tokens=most)
            assert answer.choices[0].text == text, (i, prompt)
            assert answer.usage.completion_tokens == len(tokens)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(number)))
    served.wait(lambda: not served.metric("infinigen_running_answers"))
    assert served.scheduler.late_compilations == compilations  # `generate` compiles before


def join(server: Served, **extra: Any) -> float:
    """Check an answer that another one joins and leaves; return the fraction fetched for it."""
    expected = server.expected([PROMPT], max_new_tokens=80, ignore_eos=True).texts[0]
    settings: Any = {"max_tokens": 80, "stream": True, "stream_options": {"include_usage": True}}
    parts = []
    for part in server.complete(PROMPT, **settings, extra_body=IGNORE | extra):
        parts.append(part)
        if len(parts) == 30:
            server.complete(LONG, max_tokens=5)
    assert "".join(part.choices[0].text for part in parts if part.choices) == expected
    return parts[-1].infinigen["fetched_fraction"]


def test_many_requests(server: Served):
    load(server, 24)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "settings"),
    [(SPARSE, {"rows": "int8", "hot_set": 1.5}), (Quest(budget=0.3, window=6), {})],
    ids=["int8", "pages"],
)
def test_many_requests_of_other_kinds(served: Served, policy: Policy, settings: dict[str, Any]):
    """Rows in one byte, some of them kept, and pages, which sequences join at a flush alone."""
    with serving(engine=engine_of(served.engine.model, policy, **settings)) as server:
        load(server, 24)
        join(server)


@pytest.mark.slow
def test_200_requests_leave_no_memory(served: Served):
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1])

    load(served, 200)
    before = resident()
    load(served, 200)
    assert resident() < 1.02 * before


def test_the_whole_context(server: Served):
    """Drafts need room beyond an answer that fills the context."""
    tokens = server.engine.encode(LONG)[:100]
    most = CONTEXT - len(tokens)
    answer = server.complete(tokens, max_tokens=most, extra_body=IGNORE)
    expected = server.expected([tokens], max_new_tokens=most, ignore_eos=True)
    assert answer.choices[0].text == expected.texts[0]
    error = refusal(server.complete, tokens, max_tokens=most + 1)
    assert error["code"] == "context_length_exceeded"


def test_a_failed_step_ends_its_requests_alone(server: Served, monkeypatch):
    """The server continues with an empty batch. A stream ends in an error event."""
    lossless = server.full is not None
    kind, name = (LosslessBatch, "round") if lossless else (LiveBatch, "step")
    work, calls = getattr(kind, name), itertools.count(1)

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) % 3 == 0:
            raise RuntimeError("/secret/path: broken")
        return work(*arguments, **options)

    expected = server.expected([PROMPT]).texts[0]
    body = {"model": "small", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    with monkeypatch.context() as patch:
        patch.setattr(kind, name, fail)
        status, _, content = server.request("POST", "/v1/completions", body)
        assert status == 500 and "secret" not in str(content)
        _, _, content = server.request("POST", "/v1/completions", body | {"stream": True})
    *_, event, done, rest = content.decode().split("\n\n")
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == ("internal error", "server_error")
    assert (done, rest) == ("data: [DONE]", "")
    assert server.complete(PROMPT).choices[0].text == expected


def test_heat_maps_are_those_of_the_drafts(lossless: Served):
    """A token that was not drafted has none."""
    options = {"stream": True, "extra_body": {"heat_map": True}}
    prompt, *answer = (part.infinigen for part in lossless.complete(LONG, **options))
    with_heat = [info for info in answer if "heads" in info]
    assert 0 < len(with_heat) < len(answer) == 20
    numbers = [len(prompt["prompt"]) + i for i, info in enumerate(answer[1:]) if "heads" in info]
    assert [info["tokens"] for info in with_heat] == numbers
    names = (f"infinigen_{name}_tokens_total" for name in ("drafted", "accepted"))
    drafted, accepted = map(lossless.metric, names)
    assert 0 < accepted < drafted


def test_requests_may_ask_for_it_and_not_for_less(lossless: Served, served: Served):
    """A smaller budget only fetches less, also in another batch."""
    small, usual = join(lossless, lossless=True, budget=0.01), join(lossless, lossless=True)
    assert small < usual / 2
    for server, value in ((lossless, False), (served, True)):
        error = refusal(server.complete, PROMPT, extra_body={"lossless": value})
        assert error["param"] == "lossless" and "--lossless" in error["message"]
    assert served.complete(PROMPT, extra_body={"lossless": False}).choices
    error = refusal(lossless.chat, response_format={"type": "json_object"})
    assert error["param"] == "response_format"
