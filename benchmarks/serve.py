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
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.files import note, write_json
from benchmarks.machine import describe
from benchmarks.servers import OURS, SYSTEMS, Served, running
from benchmarks.shapes import SHAPES
from infinigen_jax.text.tokenizer import load_tokenizer

VOCABULARY = 1000  # limit of the random tokens of prompts
WARM_UP = 512  # tokens of prompts before the measurement
MEASUREMENTS = ("streams", "turns", "stall")


@dataclasses.dataclass
class Prompts:
    """Prompts cut from the tokens of a text, or random ones."""

    text: np.ndarray | None

    def make(self, length: int, seed: int) -> list[int]:
        """Return a different prompt for each seed."""
        generator = np.random.default_rng(seed)
        if self.text is None:
            return generator.integers(3, VOCABULARY, length).tolist()
        start = int(generator.integers(0, len(self.text) - length))
        return self.text[start : start + length].tolist()


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
    begun, chunk = threading.Event(), server.chunk
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


def build_parser() -> argparse.ArgumentParser:
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
    return parser


def main() -> None:
    parser = build_parser()
    options = parser.parse_args()
    if "stall" in options.measure and options.system not in OURS:
        parser.error(f"--measure stall: of {' and '.join(OURS)} only; choose streams or turns")
    text = None
    if options.text is not None:
        tokenizer = load_tokenizer(Path(options.model))
        text = np.array(tokenizer.encode(options.text.read_text()[:1_000_000]))
    longest = {"streams": options.length, "turns": options.turn, "stall": options.long}
    context = max(longest[name] for name in options.measure) + 512
    with running(options, context) as system:
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
