"""A server of a small model on a loopback socket, and what its answers should be."""

import dataclasses
import functools
import http.client
import json
import socket
import threading
import time
from typing import Any

import openai
import uvicorn
from runtime import SPARSE

from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.results import Generation
from infinigen_jax.loading.load import Model, load
from infinigen_jax.policies.base import Policy
from infinigen_jax.server.app import Service, create_app
from infinigen_jax.server.connection import http_config
from infinigen_jax.server.limits import Limits
from infinigen_jax.server.metrics import Metrics
from infinigen_jax.server.scheduler import Scheduler

ROWS, CONTEXT, CHUNK = 3, 256, 64
PROMPT = "Once upon a time"
LONG = "It was a dark and stormy night, and the old man looked at the sea. " * 6
TEMPLATE = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content }}"
    "{% for c in m.tool_calls or () %}[{{ c.function.name }} {{ c.function.arguments.place }}]"
    "{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclasses.dataclass
class Served:
    """A running server."""

    engine: Engine
    scheduler: Scheduler
    port: int

    @functools.cached_property
    def client(self) -> Any:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60)

    def complete(self, prompt: Any, **settings: Any) -> Any:
        """A completion, greedy unless stated otherwise."""
        settings = {"temperature": 0, "max_tokens": 20} | settings
        return self.client.completions.create(model="small", prompt=prompt, **settings)

    def expected(self, prompts: list[Any], *sampling: Any, **settings: Any) -> Generation:
        """Return the results of `generate` for the prompts.

        The long prompt is added, which gives the cache the server's shapes.
        """
        settings = {"max_new_tokens": 20} | settings
        given = self.engine.generate([*prompts, LONG], *sampling, batch=ROWS, **settings)
        return dataclasses.replace(given, texts=given.texts[:-1], tokens=given.tokens[:-1])

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], Any]:
        """Send a plain request: status, headers and decoded body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, kind | (headers or {}))
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.headers.get_content_type() == "application/json":
            content = json.loads(content)
        return answer.status, dict(answer.headers), content

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        lines = self.request("GET", "/metrics")[2].decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def wait(self, condition: Any, seconds: float = 30) -> None:
        """Wait until a condition holds."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until
            time.sleep(0.01)


@dataclasses.dataclass
class Lossless(Served):
    """A running lossless server; `expected` has the results of the full cache."""

    full: Any = None

    def expected(self, prompts: list[Any], *sampling: Any, **settings: Any) -> Generation:
        reference = Served(self.full, self.scheduler, self.port)
        return reference.expected(prompts, *sampling, **settings)


@functools.cache
def small_engine() -> Engine:
    """An engine on the embedded model, with a chat template."""
    model = load("tiny-llama")
    model.tokenizer.chat_template = TEMPLATE
    return engine_of(model, SPARSE)


def engine_of(model: Model, policy: Policy, **settings: Any) -> Engine:
    """An engine with the settings of `small_engine`."""
    settings = {"dense_layers": 1, "schedule": "fused", "prefill_chunk": CHUNK} | settings
    return Engine(model, policy=policy, **settings)


class Running:
    """Context of a running server."""

    def __init__(
        self,
        waiting: int = 64,
        prefix_bytes: int = 1 << 24,
        engine: Engine | None = None,
        **service: Any,
    ):
        engine = engine or small_engine()
        limits = Limits.of(engine, ROWS, CONTEXT, waiting, prefix_bytes)
        self.scheduler = Scheduler(engine, limits, Metrics(engine.decoder))
        given = Service("small", drain_seconds=2, **service)
        app = create_app(self.scheduler, given)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._server = uvicorn.Server(http_config(app, given))
        arguments = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=arguments, daemon=True)

    def __enter__(self) -> Served:
        self._thread.start()
        while not self.scheduler.ready.wait(0.1):
            assert self.scheduler.failure is None, self.scheduler.failure
        port = self._socket.getsockname()[1]
        self._served = Served(self.scheduler.engine, self.scheduler, port)
        return self._served

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()
        self._served.client.close()
        assert not self._thread.is_alive()
