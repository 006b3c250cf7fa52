"""Speed of servers under concurrent requests, through HTTP on a loopback socket.

    python -m benchmarks.serve --json benchmarks/results/serving-cpu.json
    python -m benchmarks.serve --model SmolLM2-135M-Instruct --gguf SmolLM2.gguf \\
        --text wikitext2_valid.raw.txt --measure streams --system llama.cpp --rounds 1 \\
        --json benchmarks/results/serving-real-cpu.json

Without --model, a random model with peaked attention is served. Measured are the rate of one stream
and of several, the longest pause of a running stream while a long prompt is read, and the time to
the first token of a chat's first and second turn. Results are added to those in the file, so that
each system, measurement and length can have a run of its own, in turns.

`transformers serve` needs the package accelerate. It takes prompts as text, and others as tokens.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
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
WARM_UP = 512  # tokens of prompts before the measurement
MEASUREMENTS = ("streams", "turns", "stall")
OURS = ("infinigen", "infinigen-lossless")
THEIRS = {"transformers": (), "transformers-batching": ("--continuous-batching",)}
SYSTEMS = (*OURS, *THEIRS, "llama.cpp", "llama.cpp-f32")


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


def request(
    port: int, body: dict[str, Any], new: int, count: Any, begun: threading.Event | None = None
) -> Stream:
    """Stream an answer of `new` tokens from a server.

    Args:
        body: model and prompt, and the settings of the server for a greedy answer of this length.
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
    """Our server in this process."""

    def __init__(self, model: Model, context: int, rows: int, chunk: int | None, lossless: bool):
        engine = Engine(model, prefill_chunk=chunk, lossless=lossless)
        limits = Limits.of(engine, rows, context, heat_maps=False)
        self.scheduler = Scheduler(engine, limits, Metrics(engine.decoder))
        listening = socket.create_server(("127.0.0.1", 0))
        self.port, service = listening.getsockname()[1], Service("m", drain_seconds=30)
        run = uvicorn.Server(http_config(create_app(self.scheduler, service), service)).run
        threading.Thread(target=run, args=([listening],), daemon=True).start()
        while not self.scheduler.ready.wait(0.1):
            assert self.scheduler.failure is None, self.scheduler.failure

    def facts(self) -> dict[str, Any]:
        lines = self.scheduler.metrics_text().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        names = ("compilations_after_warmup", "drafted_tokens_total", "accepted_tokens_total")
        return {name: int(float(values[f"infinigen_{name}"])) for name in names}


class LlamaServed(System):
    """llama.cpp's server in this process."""

    def __init__(self, gguf: Path, name: str, context: int, rows: int):
        from benchmarks.llama_cpp import start_server

        self._server = start_server(gguf, name, rows, context, gguf.parent)
        self.port = int(self._server.listening_address.rsplit(":")[-1])

    def facts(self) -> dict[str, Any]:
        import xllamacpp  # pyright: ignore[reportMissingImports]

        return {"build": xllamacpp.__version__}


class TransformersServed(System):
    """`transformers serve` in a process of its own."""

    def __init__(self, folder: Path, model: Model, port: int):
        self.port, self._folder, self._tokenizer = port, folder, model.tokenizer

    def stream(self, prompt: list[int], new: int, begun: Any = None) -> Stream:
        text = self._tokenizer.decode(prompt)
        assert len(self._tokenizer.encode(text)) == len(prompt)
        settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new}
        body = {"model": str(self._folder), "prompt": text}
        body["generation_config"] = json.dumps(settings)
        return request(self.port, body, new, events_before_the_end, begun)


@contextlib.contextmanager
def transformers_server(model: Model, options: tuple[str, ...]) -> Iterator[TransformersServed]:
    """Run `transformers serve` on a model's folder."""
    assert model.path is not None
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as free:
        folder, port = Path(name), free.getsockname()[1]
        for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (folder / file).symlink_to((model.path / file).resolve())
        config = json.loads((model.path / "config.json").read_text())
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
            yield TransformersServed(folder, model, port)
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


def throughput(system: Any, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Measure the rate of concurrent streams.

    `tokens_per_second` counts from the last first token to the first last one, while all streams
    run; None if they never do.
    """
    begun = time.perf_counter()
    results = system.together(prompts, new)
    wall = time.perf_counter() - begun
    start, end = max(r.first for r in results), min(r.tokens[-1] for r in results)
    counted = sum(start < t <= end for r in results for t in r.tokens)
    gaps = np.concatenate([r.gaps for r in results])
    return {
        "streams": len(prompts),
        "tokens_per_second": counted / (end - start) if end > start else None,
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
    pauses = gaps[gaps > 3 * np.median(alone)]
    chunk_seconds = float(np.median(pauses))
    return {
        "prompt_tokens": long,
        "chunk": chunk,
        "chunks": -(-long // chunk),
        "pauses": len(pauses),
        "median_step_seconds": float(np.median(alone)),
        "longest_pause_seconds": float(gaps.max()),
        "median_chunk_seconds": chunk_seconds,
        "longest_pause_over_median_step": float(gaps.max() / np.median(alone)),
        "longest_pause_over_median_chunk": float(gaps.max()) / chunk_seconds,
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

    seeds = itertools.count(100)  # each prompt once: servers keep the rows of earlier ones

    def streams(count: int, new: int, length: int = options.length) -> dict[str, Any]:
        made = [prompts.make(length, next(seeds)) for _ in range(count)]
        return throughput(system, made, new)

    result: dict[str, Any] = {}
    streams(options.batch, 8, min(options.length, WARM_UP))
    if "streams" in options.measure:
        counts = options.streams * options.rounds
        measured = [streams(count, options.new) for count in counts]
        result[f"streams-{options.length}"] = {"rounds": measured, **system.facts()}
    if "turns" in options.measure:
        result["turns"] = turns(system, prompts, options.turn)
    if "stall" in options.measure:
        result["stall"] = stall(system, prompts, options.length, options.long)
    return result


@contextlib.contextmanager
def running(options: argparse.Namespace, model: Model) -> Iterator[Any]:
    """Run a system."""
    longest = {"streams": options.length, "turns": options.turn, "stall": options.long}
    context = max(longest[name] for name in options.measure) + 512
    if options.system in THEIRS:
        with transformers_server(model, THEIRS[options.system]) as server:
            yield server
    elif options.system in OURS:
        lossless = options.system == "infinigen-lossless"
        yield Served(model, context, options.batch, options.chunk, lossless)
    else:
        yield LlamaServed(options.gguf, options.system, context, options.batch)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve")
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama", help="random model (default llama)")
    add("--model", help="folder of a model, instead of a random one")
    add("--gguf", type=Path, help="the same model, for llama.cpp")
    add("--text", type=Path, help="text that prompts are cut from (default: random tokens)")
    add("--system", choices=SYSTEMS, default="infinigen")
    add("--measure", nargs="+", choices=MEASUREMENTS, default=MEASUREMENTS)
    add("--batch", type=int, default=8, help="answers that a server decodes together")
    add("--streams", type=int, nargs="+", default=[1, 8], help="streams at a time (default 1 8)")
    add("--rounds", type=int, default=2, help="rounds of these numbers of streams")
    add("--length", type=int, default=1024, help="tokens of a stream's prompt")
    add("--new", type=int, default=64, help="tokens of a stream's answer")
    add("--long", type=int, default=16384, help="tokens of the long prompt")
    add("--turn", type=int, default=4096, help="tokens of a chat's first turn")
    add("--chunk", type=int, help="tokens of a chunk (default: the server's)")
    add("--json", type=Path)
    options = parser.parse_args()
    if "stall" in options.measure and options.system not in OURS:
        parser.error(f"--measure stall: of {' and '.join(OURS)} only; choose streams or turns")
    tokenizer = load("tiny-llama").tokenizer
    if options.model is None:
        model = peaked_model(SHAPES[options.shape], options.long + 512, "float32")
        model = dataclasses.replace(model, given_tokenizer=tokenizer)
    else:
        model = load(options.model, "float32")
    text = None
    if options.text is not None:
        text = np.array(model.tokenizer.encode(options.text.read_text()[:1_000_000]))
    with running(options, model) as system:
        note("warm")
        machine = describe()
        found = measure(system, options, Prompts(text))
    note(json.dumps(found))
    if options.json is not None:
        results = json.loads(options.json.read_text()) if options.json.exists() else {}
        settings = {n: str(value) for n, value in vars(options).items() if n != "json"}
        for name in ("model", "gguf", "text"):
            settings[name] = Path(settings[name]).name
        run = {"settings": settings, "machine": machine}
        known = results.setdefault(options.system, {})
        for name, value in found.items():
            known.setdefault(name, []).append({"result": value, **run})
        write_json(options.json, results)


if __name__ == "__main__":
    main()
