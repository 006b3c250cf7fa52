"""Speed of servers under concurrent requests, through HTTP on a loopback socket.

    python -m benchmarks.serve --json benchmarks/results/serving-cpu.json
    python -m benchmarks.serve --model SmolLM2-135M-Instruct --gguf SmolLM2.gguf \\
        --text wikitext2_valid.raw.txt --measure streams --system llama.cpp --rounds 1 \\
        --json benchmarks/results/serving-real-cpu.json

Without --model, a random model with peaked attention is served. It measures the rate of one stream
and of several, the longest pause of a running stream while a long prompt is read, and the time to
the first token of a chat's first and second turn. Results are added to those in the file, so that
each system, measurement and length can run separately, in turns.

`transformers serve` needs the package accelerate. It takes prompts as text, and others as tokens.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from benchmarks.machine import describe, note, write_json
from benchmarks.shapes import SHAPES, peaked_model
from benchmarks.systems import LLAMA_CPP
from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError, run_command
from infinigen_jax.loading.load import Model, load
from infinigen_jax.server.app import Service, create_app
from infinigen_jax.server.guard import http_config
from infinigen_jax.server.limits import Limits
from infinigen_jax.server.scheduler import Scheduler
from infinigen_jax.text.tokenizer import load_tokenizer

OURS = ("infinigen", "infinigen-lossless")
THEIRS = {"transformers": (), "transformers-batching": ("--continuous-batching",)}
VOCABULARY = 1000  # limit of the random tokens of prompts
WARM_UP = 512  # tokens of prompts before the measurement
MEASUREMENTS = ("streams", "turns", "stall")


def tokens_body(prompt: list[int], new: int) -> dict[str, Any]:
    """Return the settings of a request to our server, or llama.cpp's."""
    # With log-probabilities every token is reported, also without text.
    return {"model": "m", "prompt": prompt, "ignore_eos": True, "logprobs": 1}


def scored_tokens(event: dict[str, Any]) -> int:
    """Return the number of tokens in an event of ours, or of llama.cpp."""
    scores = [choice.get("logprobs") or {} for choice in event["choices"]]
    return sum(len(each.get("tokens") or each.get("content") or ()) for each in scores)


@dataclasses.dataclass
class Server:
    """A running server, on a port of this machine."""

    port: int
    body: Callable[[list[int], int], dict[str, Any]] = tokens_body  # of a request
    count: Callable[[dict[str, Any]], int] = scored_tokens  # tokens of an event
    facts: Callable[[], dict[str, Any]] = dict  # further results
    chunk: int = 0  # tokens of a prompt that our server reads between two steps

    def get(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", path)
        return connection.getresponse()

    def stream(
        self, prompt: list[int], new: int, begun: threading.Event | None = None
    ) -> np.ndarray:
        """Stream an answer of `new` tokens; return the time of each, in seconds since the start.

        `begun` is set with the third token.
        """
        body = {"max_tokens": new, "stream": True, "temperature": 0} | self.body(prompt, new)
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        started, times = time.perf_counter(), []
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), kind)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        for line in response:
            if line.startswith(b"data: {"):
                times += [time.perf_counter() - started] * self.count(json.loads(line[6:]))
                if begun is not None and len(times) >= 3:
                    begun.set()
        assert len(times) == new, (len(times), new)
        return np.array(times)


def running(options: argparse.Namespace, context: int) -> Any:
    """Run the server that the options name, with sequences of `context` tokens."""
    if options.system in THEIRS:
        return transformers_server(Path(options.model), THEIRS[options.system])
    if options.system in OURS:
        return our_server(options, context)
    return llama_server(options, context)


@contextlib.contextmanager
def llama_server(options: argparse.Namespace, context: int) -> Iterator[Server]:
    """Run llama.cpp's server in this process."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    from benchmarks.llama_cpp import start_server

    server = start_server(options.gguf, options.system, options.batch, context)
    port = int(server.listening_address.rsplit(":")[-1])
    yield Server(port, facts=lambda: {"build": xllamacpp.__version__})


@contextlib.contextmanager
def our_server(options: argparse.Namespace, context: int) -> Iterator[Server]:
    """Run our server in a separate process, and wait until it is warm."""

    def facts() -> dict[str, Any]:
        lines = server.get("/metrics").read().decode().splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        names = ("compilations_after_warmup", "drafted_tokens_total", "accepted_tokens_total")
        return {name: int(float(values[f"infinigen_{name}"])) for name in names}

    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    command = functools.partial(serve, options, context, theirs)
    process = spawning.Process(target=run_command, args=(command,), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            port, chunk = ours.recv()
        except EOFError:  # it has ended, and said why
            sys.exit(2)
        server = Server(port, facts=facts, chunk=chunk)
        yield server
    finally:
        process.terminate()
        process.join()


def serve(options: argparse.Namespace, context: int, warm: Connection) -> None:
    """Serve a model, and send the port and the length of a chunk once the server is warm."""
    lossless = options.system == "infinigen-lossless"
    engine = Engine(make_model(options), prefill_chunk=options.chunk, lossless=lossless)
    limits = Limits(engine, options.batch, context, heat_maps=False)
    scheduler = Scheduler(engine, limits)
    listening, service = socket.create_server(("127.0.0.1", 0)), Service("m", 30)
    server = uvicorn.Server(http_config(create_app(scheduler, service), 30))

    def report() -> None:
        while not scheduler.ready.wait(0.1):
            assert scheduler.failure is None, scheduler.failure
        warm.send((listening.getsockname()[1], limits.chunk))

    threading.Thread(target=report, daemon=True).start()
    server.run([listening])


def make_model(options: argparse.Namespace) -> Model:
    if options.model is not None:
        return load(options.model, "float32")
    model = peaked_model(SHAPES[options.shape], options.long + 512, "float32")
    return dataclasses.replace(model, given_tokenizer=load("tiny-llama").tokenizer)


@contextlib.contextmanager
def transformers_server(path: Path, options: tuple[str, ...]) -> Iterator[Server]:
    """Run `transformers serve` on a model's folder, in a separate process."""
    tokenizer = load_tokenizer(path)

    def body(prompt: list[int], new: int) -> dict[str, Any]:
        text = tokenizer.decode(prompt)
        assert len(tokenizer.encode(text)) == len(prompt)
        settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new}
        return {"model": folder, "prompt": text, "generation_config": json.dumps(settings)}

    def count(event: dict[str, Any]) -> int:
        return int(event["choices"][0].get("finish_reason") is None)  # none in the last event

    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        server = Server(free.getsockname()[1], body, count)
        for file in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            (Path(folder) / file).symlink_to((path / file).resolve())
        config = json.loads((path / "config.json").read_text())
        config.setdefault("architectures", ["LlamaForCausalLM"])
        (Path(folder) / "config.json").write_text(json.dumps(config))
        free.close()
        command = ["transformers", "serve", folder, "--device", "cpu", *options]
        command += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(server.port)]
        environment, silent = os.environ | {"HF_HUB_OFFLINE": "1"}, subprocess.DEVNULL
        process = subprocess.Popen(command, env=environment, stdout=silent, stderr=silent)
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    if server.get("/health").status == 200:
                        break
                time.sleep(0.2)
            assert process.poll() is None, "transformers serve ended"
            yield server
        finally:
            process.terminate()
            process.wait()


def prompt_maker(options: argparse.Namespace) -> Callable[[int, int], list[int]]:
    """Return a function that cuts a prompt of some length, a different one for each seed."""
    text = np.random.default_rng(0).integers(3, VOCABULARY, 1_000_000).tolist()
    if options.text is not None:
        text = load_tokenizer(Path(options.model)).encode(options.text.read_text()[:1_000_000])

    def cut(length: int, seed: int) -> list[int]:
        start = int(np.random.default_rng(seed).integers(0, len(text) - length))
        return text[start : start + length]

    return cut


def throughput(server: Server, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Measure the rate of concurrent streams.

    `tokens_per_second` counts from the last first token to the first last one, while all streams
    run; None if they never do.
    """
    begun = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        times = np.stack(list(pool.map(lambda prompt: server.stream(prompt, new), prompts)))
    wall = time.perf_counter() - begun
    start, end = times[:, 0].max(), times[:, -1].min()
    counted = int(((start < times) & (times <= end)).sum())
    return {
        "streams": len(prompts),
        "tokens_per_second": counted / float(end - start) if end > start else None,
        "tokens_per_second_with_prompts": len(prompts) * new / wall,
        "first_token_seconds": percentiles(times[:, 0]),
        "token_seconds": percentiles(np.diff(times).ravel()),
    }


def percentiles(values: np.ndarray) -> dict[str, float]:
    shares = {"p50": 50, "p90": 90, "p99": 99, "most": 100}
    return {name: float(np.percentile(values, share)) for name, share in shares.items()}


def stall(server: Server, make: Any, length: int, long: int) -> dict[str, Any]:
    """Measure the pauses of a running stream while a long prompt is read."""
    begun, chunk = threading.Event(), server.chunk
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        new = long // chunk + 40
        stream = pool.submit(server.stream, make(length, 1), new, begun)
        begun.wait()
        arriving = server.stream(make(long, 2), 2)
        gaps = np.diff(stream.result())
    step = float(np.median(np.diff(server.stream(make(length, 3), 40))))
    pauses, longest = gaps[gaps > 3 * step], float(gaps.max())
    if not len(pauses):
        raise InputError(f"--long {long}: no pause is longer than three steps; raise it")
    chunk_seconds = float(np.median(pauses))
    return {
        "prompt_tokens": long,
        "chunk": chunk,
        "chunks": -(-long // chunk),
        "pauses": len(pauses),
        "median_step_seconds": step,
        "longest_pause_seconds": longest,
        "median_chunk_seconds": chunk_seconds,
        "longest_pause_over_median_step": longest / step,
        "longest_pause_over_median_chunk": longest / chunk_seconds,
        "first_token_seconds_of_the_prompt": float(arriving[0]),
    }


def turns(server: Server, make: Any, length: int) -> dict[str, Any]:
    """Measure the first token of a first turn and of a second one: an answer and a message more."""
    first = make(length, 4)
    seconds = float(server.stream(first, 2)[0])
    later = float(server.stream(first + make(96, 5), 2)[0])
    return {
        "tokens": length,
        "first_turn_seconds": seconds,
        "second_turn_seconds": later,
        "ratio": later / seconds,
    }


def measure(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    make = prompt_maker(options)
    seeds = itertools.count(100)  # each prompt once: servers keep the rows of earlier ones

    def streams(count: int, new: int, length: int = options.length) -> dict[str, Any]:
        return throughput(server, [make(length, next(seeds)) for _ in range(count)], new)

    result: dict[str, Any] = {}
    streams(options.batch, 8, min(options.length, WARM_UP))
    if "streams" in options.measure:
        counts = options.streams * options.rounds
        measured = [streams(count, options.new) for count in counts]
        result[f"streams-{options.length}"] = {"rounds": measured, **server.facts()}
    if "turns" in options.measure:
        result["turns"] = turns(server, make, options.turn)
    if "stall" in options.measure:
        result["stall"] = stall(server, make, options.length, options.long)
    return result


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve")
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="llama", help="random model (default llama)")
    add("--model", help="folder of a model, instead of a random one")
    add("--gguf", type=Path, help="the same model, for llama.cpp")
    add("--text", type=Path, help="text that prompts are cut from (default: random tokens)")
    add("--system", choices=(*OURS, *THEIRS, *LLAMA_CPP), default="infinigen")
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
    return parser


def main() -> int:
    parser = build_parser()
    options = parser.parse_args()
    if "stall" in options.measure and options.system not in OURS:
        parser.error(f"--measure stall: of {' and '.join(OURS)} only; choose streams or turns")
    return run_command(lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Measure, and add the results to those in the file."""
    longest = {"streams": options.length, "turns": options.turn, "stall": options.long}
    context = max(longest[name] for name in options.measure) + 512
    with running(options, context) as server:
        note("warm")
        machine = describe()
        found = measure(server, options)
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
    sys.exit(main())
