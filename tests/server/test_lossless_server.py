"""A lossless server: continuous batching by rounds gives the full cache's tokens."""

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from runtime import SPARSE
from serving import CONTEXT, LONG, PROMPT, ROWS, Running, Served, engine_of, small_engine
from test_openai import load

from infinigen_jax.engine.draft_length import DraftLength
from infinigen_jax.engine.lossless_batch import LosslessBatch
from infinigen_jax.policies import Full
from infinigen_jax.sampling import Sampling

POOR = dataclasses.replace(SPARSE, budget=0.05)  # drafts that are often rejected
IGNORE = {"ignore_eos": True}
PROMPTS = [PROMPT, LONG, "The king was", LONG[7:200], "She said that", LONG[30:]]


@dataclasses.dataclass
class Lossless(Served):
    """A running lossless server; `expected` has the results of the full cache."""

    full: Any = None

    def expected(self, prompts: list[Any], *sampling: Any, **settings: Any) -> Any:
        reference = Served(self.full, self.scheduler, self.port)
        return reference.expected(prompts, *sampling, **settings)


@pytest.fixture(scope="module")
def lossless(served: Served) -> Iterator[Lossless]:
    """The server. Its drafts have all lengths, which otherwise depend on measured times."""
    model, counts = small_engine().model, itertools.cycle((3, 0, 4, 1, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftLength, "choose", lambda self, most: min(next(counts), most, self.most))
        with Running(engine=engine_of(model, POOR, lossless=True)) as server:
            full = engine_of(model, Full(window=4, sinks=2))
            yield Lossless(server.engine, server.scheduler, server.port, full)


def test_answers_of_shared_batches_are_those_of_the_full_cache(lossless: Lossless):
    """Requests join and leave between rounds; nothing is compiled late, and drafts are judged."""
    settings: Any = {"max_new_tokens": 40, "ignore_eos": True}
    expected = lossless.expected(PROMPTS, **settings)
    before = lossless.scheduler.late_compilations

    def one(number: int) -> str:
        most = 10 + 5 * (number % 7)
        answer = lossless.complete(PROMPTS[number % 6], max_tokens=most, extra_body=IGNORE)
        text = lossless.engine.model.tokenizer.decode(
            expected.tokens[number % 6][:most], skip_special_tokens=True
        )
        assert answer.choices[0].text == text
        assert answer.usage.completion_tokens == most
        return text

    with concurrent.futures.ThreadPoolExecutor(2 * ROWS) as pool:
        list(pool.map(one, range(18)))
    assert lossless.scheduler.late_compilations == before
    drafted, accepted = (
        lossless.metric(f"infinigen_{name}_tokens_total") for name in ("drafted", "accepted")
    )
    assert 0 < accepted < drafted


def test_samples_are_those_of_the_full_cache(lossless: Lossless):
    """With seeds, penalties and several answers, next to a greedy one."""
    sampling = Sampling(
        temperature=0.9, top_p=0.95, presence_penalty=0.5, frequency_penalty=0.5, seed=7
    )
    expected = lossless.expected([PROMPT] * 2, sampling, ignore_eos=True).texts
    greedy = lossless.expected([LONG], max_new_tokens=60, ignore_eos=True).texts[0]
    settings: Any = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.5}
    settings |= {"frequency_penalty": 0.5, "seed": 7, "n": 2}
    before = lossless.scheduler.late_compilations
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        other = pool.submit(lossless.complete, LONG, max_tokens=60, extra_body=IGNORE)
        answer = lossless.complete(PROMPT, **settings, extra_body=IGNORE)
        assert [choice.text for choice in answer.choices] == expected
        assert other.result().choices[0].text == greedy
    assert lossless.scheduler.late_compilations == before


def test_a_round_ends_at_a_stop_string(lossless: Lossless):
    """Tokens that were accepted after it are not sent."""
    expected = lossless.expected([PROMPT]).texts[0]
    stop = expected[9:14]
    parts = list(lossless.complete(PROMPT, stop=[stop], stream=True))
    assert "".join(part.choices[0].text for part in parts) == expected[: expected.index(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"
    for most in (1, 2):
        answer = lossless.complete(PROMPT, max_tokens=most)
        assert answer.usage.completion_tokens == most
        assert answer.choices[0].finish_reason == "length"
        assert expected.startswith(answer.choices[0].text)


def test_log_probs_are_those_of_the_full_cache(lossless: Lossless):
    expected = lossless.expected([PROMPT], log_probs=3).log_probs[0]
    found = lossless.complete(PROMPT, logprobs=3).choices[0].logprobs
    values = [choice.log_prob for choice in expected]
    assert found.token_logprobs == pytest.approx(values, abs=1e-4)
    assert [len(top) for top in found.top_logprobs] == [3] * 20


def test_the_whole_context(lossless: Lossless):
    """Drafts need room beyond an answer that fills the context."""
    tokens = lossless.engine.encode(LONG)[:100]
    most = CONTEXT - len(tokens)
    answer = lossless.complete(tokens, max_tokens=most, extra_body=IGNORE)
    expected = lossless.expected([tokens], max_new_tokens=most, ignore_eos=True)
    assert answer.choices[0].text == expected.texts[0]
    with pytest.raises(openai.BadRequestError):
        lossless.complete(tokens, max_tokens=most + 1)


def test_cached_prefixes_change_nothing(lossless: Lossless):
    for end in ("The end", "Then he"):
        answer = lossless.complete(LONG + end, max_tokens=8)
        assert answer.choices[0].text == lossless.expected([LONG + end], max_new_tokens=8).texts[0]
    assert answer.usage.prompt_tokens_details.cached_tokens > 0


def test_a_client_that_goes_away_frees_its_sequence(lossless: Lossless):
    settings: Any = {"max_tokens": 200, "stream": True, "extra_body": IGNORE}
    for stream in [lossless.complete(PROMPT, **settings) for _ in range(ROWS)]:
        next(iter(stream))
        stream.close()
    lossless.wait(lambda: not lossless.metric("infinigen_running_answers"))
    assert lossless.complete(PROMPT).choices[0].text == lossless.expected([PROMPT]).texts[0]


def test_heat_maps_are_those_of_the_drafts(lossless: Lossless):
    """A token that was not drafted has none."""
    options = {"stream": True, "extra_body": {"heat_map": True}}
    prompt, *answer = (part.infinigen for part in lossless.complete(LONG, **options))
    with_heat = [info for info in answer if "heads" in info]
    assert 0 < len(with_heat) < len(answer) == 20
    numbers = [len(prompt["prompt"]) + i for i, info in enumerate(answer[1:]) if "heads" in info]
    assert [info["tokens"] for info in with_heat] == numbers


def test_requests_may_ask_for_it_and_not_for_less(lossless: Lossless, served: Served):
    body = {"extra_body": {"lossless": True, "budget": 0.01}}
    text = lossless.complete(PROMPT, **body).choices[0].text
    assert text == lossless.expected([PROMPT]).texts[0]
    for server, value in ((lossless, False), (served, True)):
        with pytest.raises(openai.BadRequestError) as caught:
            server.complete(PROMPT, extra_body={"lossless": value})
        assert caught.value.param == "lossless" and "--lossless" in caught.value.message
    assert served.complete(PROMPT, extra_body={"lossless": False}).choices
    with pytest.raises(openai.BadRequestError) as caught:
        lossless.client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "x"}],
            response_format={"type": "json_object"},
        )
    assert caught.value.param == "response_format"


def test_a_failed_round_ends_its_requests_alone(lossless: Lossless, monkeypatch):
    """The server goes on with an empty batch."""
    expected = lossless.expected([PROMPT]).texts[0]

    def fail(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(LosslessBatch, "round", fail)
        with pytest.raises(openai.InternalServerError):
            lossless.complete(PROMPT)
    assert lossless.complete(PROMPT).choices[0].text == expected


def test_many_requests(lossless: Lossless):
    load(lossless, 24)
