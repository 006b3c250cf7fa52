"""Speed of the server under concurrent requests, through its HTTP interface on a loopback socket.

    python -m benchmarks.serving --json benchmarks/results/serving-cpu.json

A random model with peaked attention is served in this process. Measured are the rate of one stream
and of several, the longest pause of a running stream while a long prompt is read, and the time to
the first token of a chat's first and second turn.
"""

import argparse
import concurrent.futures
import dataclasses
import http.client
import json
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from benchmarks.files import note, write_json
from benchmarks.machine import describe
from benchmarks.shapes import SHAPES, peaked_model
from infinigen_jax.engine.engine import Engine
from infinigen_jax.loading.load import load
from infinigen_jax.server.app import Service, create_app
from infinigen_jax.server.limits import Limits
from infinigen_jax.server.metrics import Metrics
from infinigen_jax.server.scheduler import Scheduler

VOCABULARY = 1000  # tokens of prompts are below


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


class Server:
    """A running server and its client."""

    def __init__(self, shape: str, context: int, rows: int, chunk: int | None):
        model = peaked_model(SHAPES[shape], context, "float32")
        model = dataclasses.replace(model, given_tokenizer=load("tiny-llama").tokenizer)
        engine = Engine(model, prefill_chunk=chunk)
        limits = Limits.of(engine, rows, context, heat_maps=False)
        self.scheduler = Scheduler(engine, limits, Metrics(engine.decoder))
        listening = socket.create_server(("127.0.0.1", 0))
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(create_app(self.scheduler, Service("m")), log_config=None)
        run = uvicorn.Server(config).run
        threading.Thread(target=run, args=([listening],), daemon=True).start()
        self.scheduler.ready.wait()

    def stream(self, prompt: list[int], new: int, begun: Any = None) -> Stream:
        """Stream an answer of `new` tokens.

        Args:
            begun: event that is set with the third token.
        """
        body = {"model": "m", "prompt": prompt, "max_tokens": new, "ignore_eos": True}
        # With log-probabilities every token is an event, also one without text.
        body |= {"stream": True, "temperature": 0, "logprobs": 0}
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        started = time.perf_counter()
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response, times = connection.getresponse(), []
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {"):
                count = len(json.loads(line[6:])["choices"][0]["logprobs"]["tokens"])
                times += [time.perf_counter() - started] * count
                if begun is not None and len(times) >= 3:
                    begun.set()
        assert len(times) == new, (len(times), new)
        return Stream(times)


def prompt(length: int, seed: int) -> list[int]:
    """Return random tokens."""
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def throughput(server: Server, streams: int, length: int, new: int) -> dict[str, Any]:
    """Measure the rate of concurrent streams, from the last first token to the first last one."""
    prompts = [prompt(length, 100 * streams + i) for i in range(streams)]
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        begun = time.perf_counter()
        results = list(pool.map(lambda p: server.stream(p, new), prompts))
        wall = time.perf_counter() - begun
    start, end = max(r.first for r in results), min(r.tokens[-1] for r in results)
    counted = sum(start < t <= end for r in results for t in r.tokens)
    gaps = np.concatenate([r.gaps for r in results])
    return {
        "streams": streams,
        "tokens_per_second": counted / (end - start),
        "tokens_per_second_with_prompts": streams * new / wall,
        "first_token_seconds": percentiles([r.first for r in results]),
        "token_seconds": percentiles(gaps),
    }


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return percentiles 50, 90 and 99, and the maximum."""
    shares = {"p50": 50, "p90": 90, "p99": 99, "most": 100}
    return {name: float(np.percentile(values, share)) for name, share in shares.items()}


def stall(server: Server, length: int, long: int) -> dict[str, Any]:
    """Measure the pauses of a running stream while a long prompt is read."""
    begun = threading.Event()
    steps = long // server.scheduler.limits.chunk + 40
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        running = pool.submit(server.stream, prompt(length, 1), steps, begun)
        begun.wait()
        arriving = server.stream(prompt(long, 2), 2)
        gaps = running.result().gaps
    alone = server.stream(prompt(length, 3), 40).gaps
    return {
        "prompt_tokens": long,
        "chunk": server.scheduler.limits.chunk,
        "median_step_seconds": float(np.median(alone)),
        "longest_pause_seconds": float(gaps.max()),
        "median_chunk_seconds": float(np.median(gaps[gaps > 3 * np.median(alone)])),
        "first_token_seconds_of_the_prompt": arriving.first,
    }


def turns(server: Server, length: int) -> dict[str, Any]:
    """Measure the first token of a first turn and of a second one: an answer and a message more."""
    first = prompt(length, 4)
    seconds = server.stream(first, 2).first
    later = server.stream(first + prompt(96, 5), 2).first
    return {
        "tokens": length,
        "first_turn_seconds": seconds,
        "second_turn_seconds": later,
        "ratio": later / seconds,
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama")
    add("--streams", type=int, default=8)
    add("--length", type=int, default=1024, help="tokens of a stream's prompt")
    add("--new", type=int, default=64, help="tokens of a stream's answer")
    add("--long", type=int, default=16384, help="tokens of the long prompt")
    add("--turn", type=int, default=4096, help="tokens of a chat's first turn")
    add("--chunk", type=int, help="tokens of a chunk (default: the server's)")
    add("--json", type=Path)
    options = parser.parse_args()
    server = Server(options.shape, options.long + 512, options.streams, options.chunk)
    result: dict[str, Any] = {"settings": vars(options) | {"json": None}, "machine": describe()}
    note("warm")
    throughput(server, options.streams, options.length, 8)
    result["throughput"] = [
        throughput(server, streams, options.length, options.new)
        for streams in (1, options.streams, 1, options.streams)
    ]
    note(json.dumps(result["throughput"]))
    result["turns"] = turns(server, options.turn)
    note(json.dumps(result["turns"]))
    result["stall"] = stall(server, options.length, options.long)
    note(json.dumps(result["stall"]))
    result["compilations_after_warmup"] = server.scheduler.late_compilations
    if options.json is not None:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
