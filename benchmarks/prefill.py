"""Speed of reading prompts, compared with other systems, and the device memory it takes.

    python -m benchmarks.prefill
    python -m benchmarks.prefill --prompts 4096 --rounds 5 --memory 16384 65536
    python -m benchmarks.prefill --model FOLDER --prompts 4096 --memory --gguf FILE

The systems use the same weights and take turns; llama.cpp takes part if its file is given. Each
time spans from tokens to the first new token, after compilation. Memory is the compiler's estimate
for the programs of a chunk, so its prompts are not run: temporaries, and resident arrays. On a GPU,
INFINIGEN_JAX_KERNELS=0 selects XLA's attention instead of cuDNN's; the result file names the one
used.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import machine, shapes
from benchmarks.llama_cpp import LlamaCpp
from benchmarks.machine import note, write_json
from benchmarks.tables import entry_table
from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import Placement
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.memory_plan import plan_cache
from infinigen_jax.engine.prompts import capacity_for
from infinigen_jax.errors import run_command
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill import compiled
from infinigen_jax.prefill.prefill import chunk_for

SYSTEMS = ("infinigen", "transformers", "llama.cpp-f32")
SETTINGS = ("shape", "dtype", "rounds", "batch")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prefill", description="Measure the reading of prompts."
    )
    add = parser.add_argument
    add("--model", metavar="DIR", help="converted folder (default: a random model)")
    add("--shape", choices=shapes.SHAPES, default="llama", help="shape of the random model")
    add("--dtype", default="float32")
    add("--prompts", type=int, nargs="*", default=[4096, 16384], metavar="N", help="timed")
    add("--batch", type=int, default=1, help="prompts read together (default 1)")
    add("--memory", type=int, nargs="*", default=[4096, 16384, 65536], metavar="N")
    add("--rounds", type=int, default=3, help="timed rounds, all systems in each (default 3)")
    add("--alone", action="store_true", help="time no other system")
    add("--gguf", type=Path, metavar="FILE", help="the model's GGUF file, for llama.cpp")
    add("--cap-seconds", type=float, default=math.inf, help="time after which no round starts")
    add("--json", type=Path, help="result file")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    path = options.json or machine.result_path("prefill", options.model)

    def run() -> None:
        print(table(measure(options, path)))
        note(f"written to {path}")

    return run_command(run)


def measure(options: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Measure all prompts and return the result, which is written as it grows."""
    deadline = time.monotonic() + options.cap_seconds
    model, config = shapes.model_of(options, max([*options.prompts, *options.memory]) + 2)
    engine = Engine(model)
    result: dict[str, Any] = {
        "benchmark": "prefill",
        "machine": machine.describe(),
        "settings": {name: getattr(options, name) for name in SETTINGS},
        "model": options.model and Path(options.model).name,
        "attention": attention(engine, max([*options.prompts, *options.memory])),
        "memory": [memory(engine, tokens) for tokens in options.memory],
        "times": [],
    }
    systems: dict[str, Callable[[list[list[int]]], float]] = {}
    systems["infinigen"] = lambda prompts: engine.start(prompts, max_new_tokens=1).clock.prefill
    if options.prompts and not options.alone:
        from benchmarks.torch_systems import Transformers, same_model

        other, result["logits_relative_difference"] = same_model(model, config)
        systems["transformers"] = lambda prompts: (
            Transformers(other, "transformers", prompts, 1).prefill_seconds
        )
    if options.gguf and not options.alone:
        systems["llama.cpp-f32"] = lambda prompts: (
            LlamaCpp(options.gguf, "llama.cpp-f32", prompts, 1).prefill_seconds
        )
    write_json(path, result)
    for tokens in options.prompts:
        prompts = shapes.prompts(model, tokens, options.batch, None)
        engine.start(prompts, max_new_tokens=1)  # compiles
        rounds = []
        while len(rounds) < options.rounds and (not rounds or time.monotonic() < deadline):
            rounds.append({name: measured(prompts) for name, measured in systems.items()})
        result["times"].append(summary(tokens, options.batch, rounds))
        write_json(path, result)
        if time.monotonic() >= deadline:
            break
    return result


def attention(engine: Engine, tokens: int) -> str:
    """Return whose attention kernel a prompt's chunk uses, according to its program."""
    program = chunk_programs(engine, *sizes(engine, tokens))[0]
    return "cuDNN" if "__cudnn$fmha" in program.as_text() else "XLA"


def summary(tokens: int, batch: int, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians, also of the times over this package's, round by round."""
    seconds = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    return {
        "tokens": tokens,
        "rounds": rounds,
        "tokens_per_second": {name: batch * tokens / value for name, value in seconds.items()},
        "over_infinigen": {
            name: statistics.median(r[name] / r["infinigen"] for r in rounds) for name in seconds
        },
    }


def memory(engine: Engine, tokens: int) -> dict[str, Any]:
    """Return the device bytes of reading one prompt, by purpose."""
    chunk, capacity = sizes(engine, tokens)
    plan = plan_cache(engine.decoder, 1, capacity)
    return {
        "tokens": tokens,
        "chunk": chunk,
        "weights": sum(x.nbytes for x in jax.tree.leaves(engine.runtime.weights)),
        "temporaries": max(temporaries(engine, chunk, capacity)),
        "index": plan.index,
        "dense": plan.dense_cache,
        "resident": plan.resident,
        "host_cache": plan.host_cache,
    }


def sizes(engine: Engine, tokens: int) -> tuple[int, int]:
    """Return the chunk and the capacity for a prompt."""
    capacity = capacity_for(engine.decoder, tokens + 1)
    chunk = chunk_for(engine.decoder, 1, tokens, engine.runtime.prefill_chunk)
    return min(chunk, capacity), capacity


def temporaries(engine: Engine, chunk: int, capacity: int, batch: int = 1) -> list[int]:
    """Return each chunk program's bytes in addition to its operands, including results."""
    lowered = chunk_programs(engine, chunk, capacity, batch)
    analyses = [program.compile().memory_analysis() for program in lowered]
    return [s.temp_size_in_bytes + s.output_size_in_bytes - s.alias_size_in_bytes for s in analyses]


def chunk_programs(engine: Engine, chunk: int, capacity: int, batch: int = 1) -> list[Any]:
    """Return the lowered programs that read a chunk, the host layer's first."""
    decoder, weights = engine.decoder, engine.runtime.weights
    config, chunks, at = decoder.config, decoder.of_chunks, Placement(decoder.mesh)
    cache = cache_shapes(decoder, batch, capacity)
    lengths, k, w = cache.lengths, config.num_kv_heads, 2 * config.head_dim
    x = jax.ShapeDtypeStruct((batch, chunk, config.hidden_size), decoder.dtype, sharding=at.batch)
    rows = jax.ShapeDtypeStruct((batch, k, chunk, w), decoder.dtype, sharding=at.rows)
    layer_number = jax.ShapeDtypeStruct((), jnp.int32, sharding=at.whole)
    span, layers = Span(lengths, lengths), weights.params["layers"]
    first = decoder.on_host[0]
    lowered = [
        compiled.read_layer.of(chunks).lower(
            *(layers[first], x, None, (cache.host, layer_number, cache.scales[0])),
            *((), span, lengths),
        ),
        compiled.keep.of(decoder).lower(
            *(weights.policy[0], rows, span, cache.local[first], cache.states[0]),
            *(cache.scales[0], cache.host, layer_number),
            streams=False,
        ),
    ]
    if first > 0:
        lowered += [
            compiled.read_layer.of(chunks).lower(
                layers[0], x, cache.local[0], None, (), span, lengths
            ),
            compiled.keep_on_device.of(chunks).lower(cache.local[0], rows, span),
        ]
    return lowered


def cache_shapes(decoder: Decoder, batch: int, capacity: int) -> Cache:
    """Return the shapes of a cache, placed as its arrays would be."""
    at, stored = Placement(decoder.mesh), decoder.row_format

    def shaped(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    empty = compiled.empty.of(decoder)
    cache = empty.trace(batch=batch, capacity=capacity, slots=capacity).out_info
    lengths = shaped(cache.lengths, at.batch)
    shape = (decoder.host_layers, batch, decoder.config.num_kv_heads, capacity, stored.width)
    host = jax.ShapeDtypeStruct(shape, stored.storage, sharding=at.host)
    return shaped(cache._replace(lengths=None), at.rows)._replace(host=host, lengths=lengths)


def table(result: dict[str, Any]) -> str:
    speeds = {"tokens": ("tokens", "{:,}")}
    speeds |= {f"{n}, tokens/s": (f"tokens_per_second.{n}", "{:.0f}") for n in SYSTEMS}
    speeds |= {f"{n} over infinigen": (f"over_infinigen.{n}", "{:.2f}") for n in SYSTEMS[1:]}
    memory = {"bytes at tokens": ("tokens", "{:,}")}
    parts = ("weights", "temporaries", "resident", "dense", "index", "host_cache")
    memory |= {part: (part, "{:.4g}") for part in parts}
    tables = entry_table(speeds, result["times"]), entry_table(memory, result["memory"])
    return "\n\n".join([f"Attention: {result['attention']}", *tables])


if __name__ == "__main__":
    sys.exit(main())
