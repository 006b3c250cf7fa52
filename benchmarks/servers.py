"""Servers that `benchmarks.serve` measures, each with the same client."""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import multiprocessing
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from benchmarks.presets import LLAMA_CPP
from benchmarks.shapes import SHAPES, peaked_model
from infinigen_jax.engine.engine import Engine
from infinigen_jax.loading.load import Model, load
from infinigen_jax.server.app import Service, create_app
from infinigen_jax.server.connection import http_config
from infinigen_jax.server.limits import Limits
from infinigen_jax.server.scheduler import Scheduler
from infinigen_jax.text.tokenizer import Tokenizer, load_tokenizer

OURS = ("infinigen", "infinigen-lossless")
THEIRS = {"transformers": (), "transformers-batching": ("--continuous-batching",)}
SYSTEMS = (*OURS, *THEIRS, *LLAMA_CPP)


@dataclasses.dataclass
class Stream:
    """Times of one request, in seconds since its start."""

    tokens: list[float]

    @property
    def first(self) -> float:
        return self.tokens[0]

    @property
    def gaps(self) -> np.ndarray:
        return np.diff(self.tokens)


def request(
    port: int, body: dict[str, Any], new: int, count: Any, begun: threading.Event | None = None
) -> Stream:
    """Stream an answer of `new` tokens from a server.

    Args:
        body: model and prompt, and the server's settings for a greedy answer of this length.
        count: function that returns the number of tokens of an event.
        begun: event that is set with the third token.
    """
    body = body | {"max_tokens": new, "stream": True, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    started = time.perf_counter()
    kind = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), kind)
    response, times = connection.getresponse(), []
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            times += [time.perf_counter() - started] * count(json.loads(line[6:]))
            if begun is not None and len(times) >= 3:
                begun.set()
    assert len(times) == new, (len(times), new)
    return Stream(times)


def scored_tokens(event: dict[str, Any]) -> int:
    """Return the number of tokens in an event of ours, or of llama.cpp."""
    scores = [choice.get("logprobs") or {} for choice in event["choices"]]
    return sum(len(each.get("tokens") or each.get("content") or ()) for each in scores)


def events_before_the_end(event: dict[str, Any]) -> int:
    """Return the number of tokens in an event of transformers: one, and none in the last event."""
    return int(event["choices"][0].get("finish_reason") is None)


class System:
    """A running server, on a port of this machine."""

    port: int

    def stream(self, prompt: list[int], new: int, begun: Any = None) -> Stream:
        """Stream an answer; with log-probabilities every token is reported, also without text."""
        body = {"model": "m", "prompt": prompt, "ignore_eos": True, "logprobs": 1}
        return request(self.port, body, new, scored_tokens, begun)

    def together(self, prompts: list[list[int]], new: int) -> list[Stream]:
        """Stream an answer to every prompt, all at the same time."""
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.stream(prompt, new), prompts))

    def facts(self) -> dict[str, Any]:
        """Return further results."""
        return {}


class Served(System):
    """This package's server in a separate process."""

    def __init__(self, port: int, chunk: int):
        self.port, self.chunk = port, chunk

    def facts(self) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        names = ("compilations_after_warmup", "drafted_tokens_total", "accepted_tokens_total")
        return {name: int(float(values[f"infinigen_{name}"])) for name in names}


@contextlib.contextmanager
def our_server(options: argparse.Namespace, context: int) -> Iterator[Served]:
    """Run our server, and wait until it is warm."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=serve, args=(options, context, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Served(*ours.recv())
    finally:
        process.terminate()
        process.join()


def serve(options: argparse.Namespace, context: int, warm: Connection) -> None:
    """Serve a model, and send the port and the length of a chunk once the server is warm."""
    lossless = options.system == "infinigen-lossless"
    engine = Engine(make_model(options), prefill_chunk=options.chunk, lossless=lossless)
    limits = Limits.of(engine, options.batch, context, heat_maps=False)
    scheduler = Scheduler(engine, limits)
    listening, service = socket.create_server(("127.0.0.1", 0)), Service("m", drain_seconds=30)
    server = uvicorn.Server(http_config(create_app(scheduler, service), service))

    def report() -> None:
        while not scheduler.ready.wait(0.1):
            assert scheduler.failure is None, scheduler.failure
        warm.send((listening.getsockname()[1], limits.chunk))

    threading.Thread(target=report, daemon=True).start()
    server.run([listening])


def make_model(options: argparse.Namespace) -> Model:
    """Return the model that the options name, or a random one with a tokenizer."""
    if options.model is not None:
        return load(options.model, "float32")
    model = peaked_model(SHAPES[options.shape], options.long + 512, "float32")
    return dataclasses.replace(model, given_tokenizer=load("tiny-llama").tokenizer)


class LlamaServed(System):
    """llama.cpp's server in this process."""

    def __init__(self, gguf: Path, name: str, context: int, rows: int):
        from benchmarks.llama_cpp import GGUF_COPIES, start_server

        self._server = start_server(gguf, name, rows, context, GGUF_COPIES)
        self.port = int(self._server.listening_address.rsplit(":")[-1])

    def facts(self) -> dict[str, Any]:
        import xllamacpp  # pyright: ignore[reportMissingImports]

        return {"build": xllamacpp.__version__}


class TransformersServed(System):
    """`transformers serve` in a separate process."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, port: int):
        self.port, self._folder, self._tokenizer = port, folder, tokenizer

    def stream(self, prompt: list[int], new: int, begun: Any = None) -> Stream:
        text = self._tokenizer.decode(prompt)
        assert len(self._tokenizer.encode(text)) == len(prompt)
        settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new}
        body = {"model": str(self._folder), "prompt": text}
        body["generation_config"] = json.dumps(settings)
        return request(self.port, body, new, events_before_the_end, begun)


@contextlib.contextmanager
def transformers_server(path: Path, options: tuple[str, ...]) -> Iterator[TransformersServed]:
    """Run `transformers serve` on a model's folder."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        folder, port = Path(name), free.getsockname()[1]
        for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (folder / file).symlink_to((path / file).resolve())
        config = json.loads((path / "config.json").read_text())
        config.setdefault("architectures", ["LlamaForCausalLM"])
        (folder / "config.json").write_text(json.dumps(config))
        free.close()
        command = ["transformers", "serve", str(folder), "--device", "cpu", *options]
        command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        output = subprocess.DEVNULL
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            while process.poll() is None and not answers(port):
                time.sleep(0.2)
            assert process.poll() is None, "transformers serve ended"
            yield TransformersServed(folder, load_tokenizer(path), port)
        finally:
            process.terminate()
            process.wait()


def answers(port: int) -> bool:
    """Return whether a server is healthy."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


@contextlib.contextmanager
def running(options: argparse.Namespace, context: int) -> Iterator[Any]:
    """Run the server that the options name, with sequences of `context` tokens."""
    if options.system in THEIRS:
        with transformers_server(Path(options.model), THEIRS[options.system]) as server:
            yield server
    elif options.system in OURS:
        with our_server(options, context) as server:
            yield server
    else:
        yield LlamaServed(options.gguf, options.system, context, options.batch)
