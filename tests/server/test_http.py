"""Requests that the server refuses, reports and survives, by plain HTTP."""

import concurrent.futures
import contextlib
import datetime
import functools
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from serving import CONTEXT, ROWS, Served, serving, small_engine

from infinigen_jax import Sampling, serve
from infinigen_jax.messages import Messages
from infinigen_jax.serve import start_logging
from infinigen_jax.server import guard
from infinigen_jax.server.answer import Job, RefusedError
from infinigen_jax.server.limits import Limits
from infinigen_jax.server.protocol import ChatCompletion, Completion
from infinigen_jax.server.scheduler import Scheduler

USER = {"role": "user", "content": "x"}
BODY = {"model": "small", "prompt": "Once upon a time", "max_tokens": 2}
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def strict(served: Served) -> Iterator[Served]:
    """A server with a key and an origin, and room for one sequence."""
    settings: dict[str, Any] = {"api_key": "secret", "origins": ("http://friend",)}
    with serving(prefix_bytes=0, batch=1, **settings) as server:
        yield server


@pytest.fixture
def narrow(monkeypatch) -> None:
    monkeypatch.setattr(guard, "BODY_BYTES", 1000)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(guard, "HEADER_SECONDS", 0.5)


def test_status_pages(served: Served):
    assert served.request("GET", "/health")[::2] == (200, {"status": "ok"})
    assert served.request("HEAD", "/health")[0] == 200
    assert "version" in served.request("GET", "/version")[2]
    assert "/v1/completions" in served.request("GET", "/openapi.json")[2]["paths"]
    names = "infinigen_new_tokens_total", "infinigen_compilations_after_warmup"
    served.request("POST", "/v1/completions", BODY)  # compiles programs that other tests removed
    before = [served.metric(name) for name in names]
    served.request("POST", "/v1/completions", BODY)
    assert [served.metric(name) for name in names] == [before[0] + 2, before[1]]
    assert served.metric("infinigen_host_cache_bytes") > 0
    status, headers, page = served.request("GET", "/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert served.request("POST", "/v1/embeddings", BODY)[0] == 404
    assert served.request("GET", "/v1/completions")[0] == 405
    without = {"prompt": "Once upon a time", "max_tokens": 2}
    status, _, content = served.request("POST", "/v1/completions", without)
    assert (status, content["model"]) == (200, "small")
    assert b"://" not in page, "the page needs no other host"


def test_a_chat_template_from_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "start_logging", lambda quiet: None)
    (tmp_path / "template").write_text("{{ messages[0].content }}!")
    given = ["--model", "tiny-llama", "--chat-template", str(tmp_path / "template")]
    arguments = serve.build_parser().parse_args([*given, "--quiet"])
    engine = serve.make_scheduler(arguments, Messages(True)).engine
    assert engine.encode_chat([USER]) == engine.encode("x!", add_special_tokens=False)


def test_the_name_of_a_model_is_its_folders_or_as_given(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model-v3").mkdir()
    (tmp_path / "current").symlink_to("model-v3")
    names = {".": Path.cwd().name, "org/model": "org/model", "~/current": "current"}
    for model, name in names.items():
        assert serve.make_service(serve.build_parser().parse_args(["--model", model])).model == name
    spaced = serve.build_parser().parse_args(["--api-key", " secret\n"])
    assert serve.make_service(spaced).api_key == "secret"


WRONG_FIELDS: list[dict[str, Any]] = [
    *({"prompt": wrong} for wrong in ("\ud800", [99999], [-1], [], ["a"] * 65, "a" * 10**6)),
    *({name: float("nan")} for name in ("temperature", "budget")),
    {"top_k": 10**400},
    {"\ud800": 1},
]
MALFORMED = [b"{", b"[]", b'{"prompt": 1e999, "model": "small"}', b"[" * 100_000]


@pytest.mark.parametrize(
    "body", [*MALFORMED, *(json.dumps(BODY | wrong).encode() for wrong in WRONG_FIELDS)]
)
def test_malformed_bodies(served: Served, body):
    status, _, content = served.request("POST", "/v1/completions", body)
    assert status == 400
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert "/" not in content["error"]["message"] and "Traceback" not in str(content)


MANY = 20_000
MANY_ERRORS: list[dict[str, Any]] = [
    {"prompt": [1.5] * MANY},
    {"prompt": [[1.5]] * MANY},
    {"prompt": [{}] * MANY},
    {"messages": [1] * MANY},
    {"messages": [USER | {"content": [1] * MANY}]},
    {"messages": [USER | {"tool_calls": [1] * MANY}]},
    {"messages": [USER], "tools": [1] * MANY},
    {"messages": [USER], "stop": [1] * MANY},
    {"messages": [USER], "modalities": [1] * MANY},
    {"messages": [USER], "logit_bias": {str(i): "x" for i in range(MANY)}},
    {"messages": [USER], "response_format": {str(i): i for i in range(MANY)}},
    {"messages": [USER], **{str(i): i for i in range(MANY)}},
]


@pytest.mark.parametrize("wrong", MANY_ERRORS, ids=range(len(MANY_ERRORS)))
def test_errors_are_few_however_large_a_body_is(wrong):
    """Otherwise they would occupy the server for minutes, and gigabytes of memory."""
    kind = ChatCompletion if "messages" in wrong else Completion
    with pytest.raises(ValidationError) as caught:
        kind.model_validate({"model": "small"} | wrong)
    assert caught.value.error_count() < 10


def test_an_unknown_name_is_shortened(served: Served):
    for kind in ("application/json", "application/x+JSON"):
        headers = {"Content-Type": kind}
        error = served.request("POST", "/v1/completions", BODY | {"a: b" * 99: 1}, headers)[2]
        assert error["error"]["param"] == ("a: b" * 99)[:100]


def test_a_body_without_its_type(served: Served):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # as curl sends it
    content = served.request("POST", "/v1/completions", BODY, headers)[2]
    assert "send Content-Type: application/json" in content["error"]["message"]


def test_api_key(strict: Served):
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        for path in ("/v1/models", "/metrics"):
            status, answered, content = strict.request("GET", path, headers=headers)
            assert (status, content["error"]["code"]) == (401, "invalid_api_key")
            assert answered["www-authenticate"] == "Bearer"
        assert strict.request("POST", "/v1/completions", BODY, headers)[0] == 401
    for key in (KEY, {"Authorization": "bearer  secret"}):
        assert strict.request("POST", "/v1/completions", BODY, key)[0] == 200
    assert strict.request("GET", "/health")[0] == strict.request("GET", "/")[0] == 200


def test_one_sequence_at_a_time(strict: Served, served: Served):
    bodies = [BODY | {"n": n, "max_tokens": 12, "temperature": 0} for n in (1, 2, 1)]
    text = served.expected([BODY["prompt"]], max_new_tokens=12).texts[0]
    before = strict.scheduler.late_compilations
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        request = functools.partial(strict.request, "POST", "/v1/completions", headers=KEY)
        for status, _, content in pool.map(request, bodies):
            assert status == 200, content
            assert {choice["text"] for choice in content["choices"]} == {text}
    assert strict.scheduler.late_compilations == before


def test_origins(strict: Served, served: Served):
    for server, origin, allowed in (
        (strict, "http://friend", "http://friend"),
        (strict, "http://stranger", None),
        (served, "http://friend", None),
    ):
        headers = server.request("GET", "/health", headers={"Origin": origin})[1]
        assert headers.get("access-control-allow-origin") == allowed


def test_bodies_too_large_or_too_slow(strict: Served, narrow):
    body = json.dumps(BODY | {"prompt": "x" * 1000}).encode()
    assert strict.request("POST", "/v1/completions", body, KEY)[0] == 413
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
    chunk = "a0\r\n" + "x" * 160 + "\r\n"
    chunked = _raw(strict, f"{head}Transfer-Encoding: chunked\r\n\r\n{chunk * 10}")
    assert chunked.startswith("HTTP/1.1 413") and "connection: close" in chunked
    # The rest of the body never comes.
    slow = _raw(strict, f"{head}Content-Length: 100\r\n\r\n{{")
    assert slow.startswith("HTTP/1.1 408") and "connection: close" in slow
    assert strict.request("GET", "/health", headers={"X": "x" * 20_000})[0] == 431
    assert strict.request("POST", "/v1/completions", BODY, KEY)[0] == 200


def test_a_body_that_nobody_reads_keeps_no_connection(strict: Served):
    with socket.create_connection(("127.0.0.1", strict.port), timeout=5) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        answer = b""
        while received := connection.recv(1000):
            answer += received
    assert answer.startswith(b"HTTP/1.1 200")


def test_connections_without_whole_headers_are_closed(strict: Served, narrow):
    """A byte now and then does not help, and neither does an earlier request."""
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for sent in (b"", b"GET /health HTTP/1.1\r\nHost: ", whole):
        with socket.create_connection(("127.0.0.1", strict.port), timeout=5) as connection:
            connection.sendall(sent)
            if sent == whole:
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            begun = time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < begun + 5:
                    if sent:
                        connection.sendall(b"x")
                    connection.settimeout(0.05)
                    with contextlib.suppress(TimeoutError):
                        if not connection.recv(1000):
                            break
            assert 0.3 < time.monotonic() - begun < 3
    assert strict.request("GET", "/health")[0] == 200


def test_headers_may_arrive_in_parts_and_connections_are_reused(strict: Served, narrow):
    with socket.create_connection(("127.0.0.1", strict.port), timeout=5) as connection:
        for _ in range(2):
            for part in (b"GET /health HTTP/1.1\r\n", b"Host: localhost\r\n\r\n"):
                connection.sendall(part)
                time.sleep(0.1)
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            time.sleep(0.7)


def _raw(server: Served, text: str) -> str:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(text.encode())
        return connection.recv(1000).decode()


def job(most: int, send: Any, tokens: int = 5) -> Job:
    fixed = (), frozenset(), None, None, None, False, False
    return Job([7] * tokens, most, Sampling(), 1, *fixed, send)


def test_full_queue_and_shutdown(served: Served, monkeypatch):
    """Waiting requests are bounded, and those that are unfinished at the end fail."""
    with serving(waiting=1, prefix_bytes=0) as server:
        ended: list[Any] = []
        scheduler = server.scheduler
        live: Any = scheduler._batch.live
        step = live.step
        monkeypatch.setattr(live, "step", lambda *a: (time.sleep(0.02), step(*a))[1])

        def send(piece: Any) -> None:
            if isinstance(piece, Exception):
                ended.append(piece)

        status, _, content = server.request(
            "POST", "/v1/completions", BODY | {"prompt": ["a", "b"]}
        )
        assert (status, content["error"]["param"]) == (400, "prompt")
        for _ in range(2):
            scheduler.submit([job(1, send)])  # all run together

        def is_full() -> bool:
            """Return whether no sequence is free, and a request waits."""
            try:
                scheduler.submit([job(240, send)])
            except RefusedError as error:
                assert error.status == 429
                names = "infinigen_running_answers", "infinigen_waiting_requests"
                running, waiting = map(server.metric, names)
                return running == ROWS and waiting >= 1
            return False

        server.wait(is_full)
        status, headers, content = server.request("POST", "/v1/completions", BODY)
        assert (status, headers["retry-after"]) == (429, "1")
        assert content["error"]["type"] == "rate_limit_error"
        long = {"messages": [USER | {"content": "x" * 10**6}]}
        for path, body in (("completions", {"prompt": [99_999]}), ("chat/completions", long)):
            assert server.request("POST", f"/v1/{path}", body)[0] == 429
    assert {error.status for error in ended} == {503}
    with pytest.raises(RefusedError, match="stopping") as caught:
        scheduler.submit([job(1, send)])
    assert caught.value.status == 503


def test_clients_that_die_at_any_point(served: Served):
    """While the request is sent, and after any part of the answer; others are not affected."""

    def cancelled() -> int:
        lines = served.request("GET", "/metrics")[2].decode().splitlines()
        name = 'infinigen_requests_total{outcome="cancelled"} '
        return sum(int(float(x.removeprefix(name))) for x in lines if x.startswith(name))

    before = cancelled()
    expected = served.expected(["Once upon a time"], max_new_tokens=40).texts[0]
    stream = {"max_tokens": 100, "stream": True, "ignore_eos": True, "temperature": 0}
    body = json.dumps(BODY | stream).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    points = [(sent, 0) for sent in (*range(0, len(whole), 80), len(whole) - 1, len(whole))]
    points += [(len(whole), received) for received in (1, 100, 300, 1000, 3000, 10_000)]
    for number, (sent, received) in enumerate(points):
        with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
            linger = struct.pack("ii", 1, 0)  # the end is a reset, as when the process is killed
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.sendall(whole[:sent])
            while received > 0:
                received -= len(connection.recv(received))
        if number % 6 == 0:
            settings = {"max_tokens": 40, "temperature": 0}
            answer = served.request("POST", "/v1/completions", BODY | settings)[2]
            assert answer["choices"][0]["text"] == expected
    names = "infinigen_running_answers", "infinigen_waiting_requests"
    served.wait(lambda: not any(map(served.metric, names)))
    assert cancelled() > before + 2  # their answers are not computed to the end


def test_not_ready_before_the_warm_up(served: Served):
    engine = small_engine()
    scheduler = Scheduler(engine, Limits(engine, ROWS, CONTEXT))
    with pytest.raises(RefusedError, match="starting") as caught:
        scheduler.submit([job(1, print)])
    assert caught.value.status == 503
    scheduler.stop(1.0)


def test_stopped_in_the_warm_up(served: Served, monkeypatch):
    """Between two programs, of which there would be more."""
    scheduler = Scheduler(small_engine(), Limits(small_engine(), ROWS, CONTEXT))
    begun = threading.Event()

    def programs(reading: Any) -> Iterator[None]:
        while begun.set() is None:
            yield

    monkeypatch.setattr(scheduler._batch, "warm_up", programs)
    scheduler.start()
    assert begun.wait(60) and scheduler.stop(5.0) and not scheduler.ready.is_set()


def test_a_long_prompt_stalls_no_stream(served: Served):
    """Between two of its chunks, running answers get a token."""
    times: list[str] = []

    def of(name: str) -> Any:
        def send(piece: Any) -> None:
            times.append(name)

        return send

    running = job(200, of("running"))
    served.scheduler.submit([running])
    served.wait(lambda: len(times) > 2)
    before = len(times)
    chunks = 3
    served.scheduler.submit([job(1, of("long"), chunks * 64 - 5)])
    served.wait(lambda: "long" in times)
    served.scheduler.cancel(running)
    assert times[before:].index("long") > chunks


def test_prompt_tokens_are_those_read(served: Served):
    """A request that is dropped before its turn adds none."""
    served.wait(lambda: not served.metric("infinigen_running_answers"))
    dropped, ended = job(1, print, tokens=100), []
    dropped.cancelled = True
    before = served.metric("infinigen_prompt_tokens_total")
    served.scheduler.submit([dropped, job(1, ended.append, tokens=9)])
    served.wait(lambda: ended)
    served.wait(lambda: not served.metric("infinigen_running_answers"))
    assert served.metric("infinigen_prompt_tokens_total") == before + 9


def test_a_request_is_one_line_of_json(served: Served, capsys):
    """Also after logging was started twice, as by two servers of a process."""
    logger = logging.getLogger("infinigen_jax.requests")
    parent = logger.parent
    before = logger.propagate, logger.handlers, parent.level
    try:
        start_logging(quiet=False)
        start_logging(quiet=False)
        served.complete("The sea", max_tokens=7)
        text, until = "", time.monotonic() + 30
        while '"new_tokens": 7' not in text and time.monotonic() < until:
            text += capsys.readouterr().err
            time.sleep(0.01)
    finally:
        logger.propagate, logger.handlers = before[:2]
        parent.setLevel(before[2])
    # Requests of earlier tests may end only now.
    records = [json.loads(line) for line in text.splitlines()]
    (record,) = (each for each in records if (each["outcome"], each["new_tokens"]) == ("ok", 7))
    assert datetime.datetime.fromisoformat(record["time"]).tzinfo is not None
