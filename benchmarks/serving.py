"""Speed of servers under concurrent requests, through HTTP on a loopback socket.

    python -m benchmarks.serving --json benchmarks/results/serving-cpu.json
    python -m benchmarks.serving --model SmolLM2 --gguf SmolLM2.gguf --text book.txt \\
        --measure streams --system llama.cpp --json benchmarks/results/serving-real.json

Without --model, a random model with peaked attention is served. Measured are the rate of one stream
and of several, the longest pause of a running stream while a long prompt is read, and the time to
the first token of a chat's first and second turn. Results of other measurements and systems stay in
the file, so that each can have a run of its own.
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
from infinigen_jax.loading.load import Model, load
from infinigen_jax.server.app import Service, create_app
from infinigen_jax.server.connection import http_config
from infinigen_jax.server.limits import Limits
from infinigen_jax.server.metrics import Metrics
from infinigen_jax.server.scheduler import Scheduler

VOCABULARY = 1000  # random tokens of prompts are below
MEASUREMENTS = ("streams", "turns", "stall")
SYSTEMS = ("infinigen", "llama.cpp", "llama.cpp-f32", "transformers")


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


@dataclasses.dataclass
class Prompts:
    """Prompts cut from a text, or random ones.

    Attributes:
        text: tokens; None for random prompts.
    """

    text: np.ndarray | None

    def make(self, length: int, seed: int) -> list[int]:
        """Return a prompt of its own for each seed."""
        generator = np.random.default_rng(seed)
        if self.text is None:
            return generator.integers(3, VOCABULARY, length).tolist()
        start = int(generator.integers(0, len(self.text) - length))
        return self.text[start : start + length].tolist()


def request(port: int, prompt: list[int], new: int, begun: Any = None) -> Stream:
    """Stream an answer of `new` tokens from a server.

    Args:
        begun: event that is set with the third token.
    """
    body = {"model": "m", "prompt": prompt, "max_tokens": new, "ignore_eos": True}
    # With log-probabilities every token is reported, also one without text.
    body |= {"stream": True, "temperature": 0, "logprobs": 1}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    started = time.perf_counter()
    kind = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), kind)
    response, times = connection.getresponse(), []
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            times += [time.perf_counter() - started] * reported_tokens(json.loads(line[6:]))
            if begun is not None and len(times) >= 3:
                begun.set()
    assert len(times) == new, (len(times), new)
    return Stream(times)


def reported_tokens(event: dict[str, Any]) -> int:
    """Return the number of tokens in an event of ours, or of llama.cpp."""
    scores = [choice.get("logprobs") or {} for choice in event["choices"]]
    return sum(len(each.get("tokens") or each.get("content") or ()) for each in scores)


class Served:
    """Our server in this process."""

    def __init__(self, model: Model, context: int, rows: int, chunk: int | None):
        engine = Engine(model, prefill_chunk=chunk)
        limits = Limits.of(engine, rows, context, heat_maps=False)
        self.scheduler = Scheduler(engine, limits, Metrics(engine.decoder))
        listening = socket.create_server(("127.0.0.1", 0))
        self._port, service = listening.getsockname()[1], Service("m", drain_seconds=30)
        run = uvicorn.Server(http_config(create_app(self.scheduler, service), service)).run
        threading.Thread(target=run, args=([listening],), daemon=True).start()
        self.scheduler.ready.wait()

    def stream(self, prompt: list[int], new: int, begun: Any = None) -> Stream:
        return request(self._port, prompt, new, begun)

    def together(self, prompts: list[list[int]], new: int) -> list[Stream]:
        """Stream an answer to every prompt, all at the same time."""
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.stream(prompt, new), prompts))


class LlamaServed(Served):
    """llama.cpp's server in this process."""

    def __init__(self, gguf: Path, name: str, context: int, rows: int):
        from benchmarks.llama_cpp import start_server

        self._server = start_server(gguf, name, rows, context, gguf.parent)
        self._port = int(self._server.listening_address.rsplit(":")[-1])


class Loop:
    """Loop over a batch with transformers' model, without HTTP; prompts begin and end together."""

    def __init__(self, model: Model):
        from benchmarks.torch_systems import torch_model

        assert model.path is not None
        settings = json.loads((model.path / "config.json").read_text())
        self._model = torch_model(model, settings)

    def together(self, prompts: list[list[int]], new: int) -> list[Stream]:
        from benchmarks.torch_systems import Transformers

        started = time.perf_counter()
        running, times = Transformers(self._model, "transformers", prompts, new, 2), []
        for _ in range(new):
            times.append(time.perf_counter() - started)
            running.step()
        return [Stream(times)] * len(prompts)


def throughput(system: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Measure the rate of concurrent streams, from the last first token to the first last one."""
    begun = time.perf_counter()
    results = system.together(prompts, new)
    wall = time.perf_counter() - begun
    start, end = max(r.first for r in results), min(r.tokens[-1] for r in results)
    counted = sum(start < t <= end for r in results for t in r.tokens)
    gaps = np.concatenate([r.gaps for r in results])
    return {
        "streams": len(prompts),
        "tokens_per_second": counted / (end - start),
        "tokens_per_second_with_prompts": len(prompts) * new / wall,
        "first_token_seconds": percentiles([r.first for r in results]),
        "token_seconds": percentiles(gaps),
    }


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return percentiles 50, 90 and 99, and the maximum."""
    shares = {"p50": 50, "p90": 90, "p99": 99, "most": 100}
    return {name: float(np.percentile(values, share)) for name, share in shares.items()}


def stall(server: Served, prompts: Prompts, length: int, long: int) -> dict[str, Any]:
    """Measure the pauses of a running stream while a long prompt is read."""
    begun, chunk = threading.Event(), server.scheduler.limits.chunk
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        new = long // chunk + 40
        running = pool.submit(server.stream, prompts.make(length, 1), new, begun)
        begun.wait()
        arriving = server.stream(prompts.make(long, 2), 2)
        gaps = running.result().gaps
    alone = server.stream(prompts.make(length, 3), 40).gaps
    return {
        "prompt_tokens": long,
        "chunk": chunk,
        "median_step_seconds": float(np.median(alone)),
        "longest_pause_seconds": float(gaps.max()),
        "median_chunk_seconds": float(np.median(gaps[gaps > 3 * np.median(alone)])),
        "first_token_seconds_of_the_prompt": arriving.first,
    }


def turns(server: Served, prompts: Prompts, length: int) -> dict[str, Any]:
    """Measure the first token of a first turn and of a second one: an answer and a message more."""
    first = prompts.make(length, 4)
    seconds = server.stream(first, 2).first
    later = server.stream(first + prompts.make(96, 5), 2).first
    return {
        "tokens": length,
        "first_turn_seconds": seconds,
        "second_turn_seconds": later,
        "ratio": later / seconds,
    }


def measure(system: Any, options: argparse.Namespace, prompts: Prompts) -> dict[str, Any]:
    """Return the results of the chosen measurements."""

    def streams(count: int, new: int) -> dict[str, Any]:
        seeds = range(100 * count, 101 * count)
        made = [prompts.make(options.length, new * seed) for seed in seeds]
        return throughput(system, made, new)

    result: dict[str, Any] = {}
    streams(options.streams, 8)
    if "streams" in options.measure:
        counts = (1, options.streams) * options.rounds
        result["streams"] = [streams(count, options.new) for count in counts]
    if "turns" in options.measure:
        result["turns"] = turns(system, prompts, options.turn)
    if "stall" in options.measure:
        result["stall"] = stall(system, prompts, options.length, options.long)
    if isinstance(system, Served) and options.system == "infinigen":
        result["compilations_after_warmup"] = system.scheduler.late_compilations
    return result


def start(options: argparse.Namespace, model: Model) -> Any:
    """Return the running system."""
    longest = {"streams": options.length, "turns": options.turn, "stall": options.long}
    context = max(longest[name] for name in options.measure) + 512
    if options.system == "transformers":
        return Loop(model)
    if options.system != "infinigen":
        return LlamaServed(options.gguf, options.system, context, options.streams)
    return Served(model, context, options.streams, options.chunk)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama", help="random model (default llama)")
    add("--model", help="folder of a model, instead of a random one")
    add("--gguf", type=Path, help="the same model, for llama.cpp")
    add("--text", type=Path, help="text that prompts are cut from (default: random tokens)")
    add("--system", choices=SYSTEMS, default="infinigen")
    add("--measure", nargs="+", choices=MEASUREMENTS, default=MEASUREMENTS)
    add("--rounds", type=int, default=2, help="rounds of one stream and of several")
    add("--streams", type=int, default=8)
    add("--length", type=int, default=1024, help="tokens of a stream's prompt")
    add("--new", type=int, default=64, help="tokens of a stream's answer")
    add("--long", type=int, default=16384, help="tokens of the long prompt")
    add("--turn", type=int, default=4096, help="tokens of a chat's first turn")
    add("--chunk", type=int, help="tokens of a chunk (default: the server's)")
    add("--json", type=Path)
    options = parser.parse_args()
    tokenizer = load("tiny-llama").tokenizer
    if options.model is None:
        model = peaked_model(SHAPES[options.shape], options.long + 512, "float32")
        model = dataclasses.replace(model, given_tokenizer=tokenizer)
    else:
        model = load(options.model, "float32")
    text = None
    if options.text is not None:
        text = np.array(model.tokenizer.encode(options.text.read_text()[:1_000_000]))
    system = start(options, model)
    note("warm")
    machine = describe()
    found = measure(system, options, Prompts(text))
    note(json.dumps(found))
    if options.json is not None:
        results = json.loads(options.json.read_text()) if options.json.exists() else {}
        settings = {n: str(value) for n, value in vars(options).items() if n != "json"}
        run = {"settings": settings, "machine": machine}
        known = results.setdefault(options.system, {})
        for name, value in found.items():
            known[name] = {"result": value, **run}
        write_json(options.json, results)


if __name__ == "__main__":
    main()
