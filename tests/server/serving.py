"""A server of a small model on a loopback socket, and its expected answers."""

import contextlib
import dataclasses
import functools
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import uvicorn
from runtime import SPARSE

from infinigen_jax import Engine, Generation, Model, load
from infinigen_jax.policies.base import Policy
from infinigen_jax.server.app import Service, create_app
from infinigen_jax.server.guard import http_config
from infinigen_jax.server.limits import Limits
from infinigen_jax.server.scheduler import Scheduler

ROWS, CONTEXT, CHUNK = 3, 256, 64
PROMPT = "Once upon a time"
LONG = "It was a dark and stormy night, and the old man looked at the sea. " * 6
TEMPLATE = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}"
    "{% if enable_thinking %}(thinks){% endif %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}"
    "{% for c in m.tool_calls or () %}[{{ c.function.name }} {{ c.function.arguments.place }}]"
    "{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclasses.dataclass
class Served:
    """Running server; `full` is the engine with the full cache, for a lossless one."""

    engine: Engine
    scheduler: Scheduler
    port: int
    full: Engine | None = None

    @functools.cached_property
    def client(self) -> Any:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60)

    def complete(self, prompt: Any, **settings: Any) -> Any:
        """Request a completion, greedy unless stated otherwise."""
        settings = {"temperature": 0, "max_tokens": 20} | settings
        return self.client.completions.create(model="small", prompt=prompt, **settings)

    def chat(self, text: str = "a story", **settings: Any) -> Any:
        """Request an answer to a message, greedy unless stated otherwise."""
        settings = {"messages": [{"role": "user", "content": text}], "temperature": 0} | settings
        return self.client.chat.completions.create(model="small", **settings)

    def expected(self, prompts: list[Any], *sampling: Any, **settings: Any) -> Generation:
        """Return the results of `generate` for the prompts.

        The long prompt fills the batch, which gives the cache the server's shapes.
        """
        settings, count = {"max_new_tokens": 20} | settings, len(prompts)
        engine, others = self.full or self.engine, [LONG] * max(1, ROWS - count)
        given = engine.generate([*prompts, *others], *sampling, batch=ROWS, **settings)
        return dataclasses.replace(given, texts=given.texts[:count], tokens=given.tokens[:count])

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Send a plain request; return status, headers and decoded body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, kind | (headers or {}))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if content and answer.headers.get_content_type() == "application/json":
            content = json.loads(content)
        return answer.status, dict(answer.headers), content

    def metric(self, name: str) -> float:
        lines = self.request("GET", "/metrics")[2].decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def wait(self, condition: Any, seconds: float = 30) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.01)


def refusal(request: Any, *arguments: Any, **settings: Any) -> dict[str, Any]:
    """Return the error of a request that is refused."""
    with pytest.raises(openai.BadRequestError) as caught:
        request(*arguments, **settings)
    error: Any = caught.value.body
    assert error["type"] == "invalid_request_error"
    return error


@functools.cache
def small_engine() -> Engine:
    """Return an engine on the embedded model, with a chat template."""
    model = load("tiny-llama")
    model.tokenizer.chat_template = TEMPLATE
    return engine_of(model, SPARSE)


def engine_of(model: Model, policy: Policy, **settings: Any) -> Engine:
    """Return an engine with the settings of `small_engine`."""
    settings = {"dense_layers": 0, "schedule": "fused", "prefill_chunk": CHUNK} | settings
    return Engine(model, policy=policy, **settings)


@contextlib.contextmanager
def serving(
    waiting: int = 64,
    prefix_bytes: int = 1 << 24,
    engine: Engine | None = None,
    batch: int = ROWS,
    **service: Any,
) -> Iterator[Served]:
    """Run a server, once it is ready, and end it."""
    engine = engine or small_engine()
    limits = Limits(engine, batch, CONTEXT, waiting, prefix_bytes)
    scheduler = Scheduler(engine, limits)
    made = Service("small", drain_seconds=2, **service)
    server = uvicorn.Server(http_config(create_app(scheduler, made), made.drain_seconds))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        given = {"sockets": [listening]}
        thread = threading.Thread(target=server.run, kwargs=given, daemon=True)
        thread.start()
        while not scheduler.ready.wait(0.1):
            assert scheduler.failure is None, scheduler.failure
        served = Served(engine, scheduler, listening.getsockname()[1])
        try:
            yield served
        finally:
            server.should_exit = True
            thread.join(30)
            served.client.close()
    assert not thread.is_alive()
