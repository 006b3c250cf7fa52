"""Parts of the server without one: texts of answers, and names that clients may call it."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from tiny import Letters

from infinigen_jax import Choice, Sampling
from infinigen_jax.server.answer import Answer, Job, Piece, TokenScore, tokens_per_second
from infinigen_jax.server.guard import Guard
from infinigen_jax.server.protocol import Completion
from infinigen_jax.server.wire import Wire


def answered(text: str, stop: list[str], most: int = 1000, ends: str = "") -> tuple[list, Answer]:
    wanted = most, Sampling(), 1, tuple(stop), frozenset(map(ord, ends))
    answer = Answer(Letters(), Job([], *wanted, None, None, None, False, False, print), 0)
    pieces = []
    for letter in text:
        pieces.append(answer.push(ord(letter), Choice(-1.0, [])))
        if pieces[-1].finish:
            break
    return pieces, answer


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(text, stop):
    pieces, _ = answered(text + "c", stop, ends="c")
    sent = "".join(piece.text for piece in pieces)
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert sent == (text[: min(ends)[1]] if ends else text)
    assert pieces[-1].finish == "stop"
    assert "".join(chr(s.token) for p in pieces for s in p.scores) == sent


class Bytes(Letters):
    """Tokenizer whose tokens above 99 are bytes of characters, and whose decoder strips."""

    @staticmethod
    def decode(tokens: list[int], skip_special_tokens: bool = True) -> str:
        text = "".join("\ufffd" if token > 99 else chr(token) for token in tokens)
        return text.removeprefix(" ")


def test_log_probabilities_by_text():
    """The likeliest of the tokens with one text counts. The drawn one is listed, with its space."""
    body = Completion.model_validate({"model": "m", "prompt": "a", "logprobs": 3})
    wire = Wire("m", body, Bytes(), [[97]])
    top = [(32, -1.0), (200, -2.0), (201, -5.0)]
    scores = TokenScore(32, Choice(-1.0, top), 0), TokenScore(66, Choice(-9.0, top), 1)
    wire.add(0, Piece(0, " B", scores, "stop"))
    numbers = {"new_tokens": 1, "begun": 1, "first": 5.0, "last": 5.0}
    job: Any = SimpleNamespace(tokens=[97], cached_tokens=0, fetched_fraction=0, **numbers)
    (choice,) = wire.whole([job])["choices"]
    assert choice["logprobs"]["tokens"] == [" ", "B"]
    first, second = (list(top.items()) for top in choice["logprobs"]["top_logprobs"])
    assert first == [(" ", -1.0), ("\ufffd", -2.0)]
    assert second == [*first, ("B", -9.0)]


def test_a_rate_is_of_the_tokens_after_the_first_of_each_answer():
    def rate(*jobs: tuple[float, float, int, int]) -> float:
        names = ("first", "last", "new_tokens", "begun")
        made: Any = [SimpleNamespace(**dict(zip(names, job, strict=True))) for job in jobs]
        return tokens_per_second(made)

    assert rate((0.0, 0.0, 0, 0)) == rate((1.0, 1.001, 8, 8)) == 0  # eight answers of one token
    assert rate((1.0, 2.0, 16, 8)) == 8
    assert rate((1.0, 2.0, 31, 1), (3.0, 4.0, 31, 1)) == 20  # one after the other
    assert rate((1.0, 3.0, 31, 1), (1.0, 3.0, 31, 1), (0.0, 0.0, 0, 0)) == 30


@pytest.mark.parametrize(
    ("host", "settings", "status"),
    [
        *((host, {}, 200) for host in ("127.0.0.1:80", "[::1]", "localhost:80", "")),
        *((host, {}, 403) for host in ("stranger:80", "127.0.0.1.stranger", "[")),
        ("stranger", {"api_key": "secret"}, 200),
        ("friend:80", {"origins": ("http://friend",)}, 200),
        ("stranger", {"origins": ("http://friend",)}, 403),
        ("stranger", {"origins": ("*",)}, 200),
        ("stranger", {"server": "10.0.0.2"}, 200),
        ("stranger", {"server": "::ffff:127.0.0.1"}, 403),
        (socket.gethostname(), {}, 200),
    ],
)
def test_a_page_whose_name_leads_to_this_machine(host, settings, status):
    """It would read answers as its own, whatever origins are allowed (DNS rebinding)."""
    settings = {"server": "127.0.0.1", "api_key": None, "origins": ()} | settings
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/health"}
    scope |= {"server": (settings.pop("server"), 80), "headers": [(b"host", host.encode())]}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    app: Any = Guard(Response(), **settings)
    asyncio.run(app(scope, None, send))
    assert sent[0]["status"] == status
