"""What smaller rows and a smaller index cost in accuracy, and what the index costs in time.

    python -m benchmarks.quantisation --models DIR ... --text FILE
    python -m benchmarks.quantisation --no-speed

Rows: relative error of the attention output when the rows between 4 sinks and 32 recent tokens are
stored; beside the formats of the package, the same bytes with other scales. Index: attention mass
of the tokens that it finds over that of the best as many, with the layer before as the source of
the query. Both at the second half of a text whose first half counts as the prompt. Speed: scoring
one layer, by turns, over arrays that are too many for the processor's cache.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.files import RESULTS, note, write_json
from benchmarks.quantisation_tables import index_table, rows_table, speed_table
from infinigen_jax import checkpoint
from infinigen_jax.attention import MASKED
from infinigen_jax.checkpoint import Model
from infinigen_jax.evaluation.texts import read_text
from infinigen_jax.index import IndexFormat
from infinigen_jax.models import blueprint
from infinigen_jax.prompt_layer import chunk_layer
from infinigen_jax.rows import RowFormat, Scales, row_format
from infinigen_jax.span import Span
from infinigen_jax.speculation import (
    partial_columns,
    partial_keys,
    speculate_query,
    speculation_weights,
)

SINKS, RECENT, SHARE, EVERY = 4, 32, 0.05, 8
INDEXES = [("float32", 0.25), ("bfloat16", 0.25), ("int8", 0.25), ("int4", 0.25)]
INDEXES += [("int4", 0.5), ("int4", 0.75), ("int8", 1.0), ("int4", 1.0), ("float32", 1.0)]
SPEED = [("float32", 16), ("int8", 16), ("int4", 16), ("float32", 64), ("int8", 64), ("int4", 64)]
CALIBRATION = Path(checkpoint.__file__).parent / "convert" / "calibration.txt"


class Sample(NamedTuple):
    """One layer over a text: grouped queries [k, g, s, d], keys and values [k, s, d]."""

    queries: jax.Array
    keys: jax.Array
    values: jax.Array


def plain(scales: Scales) -> Scales:
    """Groups of the row alone."""
    return Scales(jnp.zeros_like(scales.centre), jnp.ones_like(scales.spread))


def centred(scales: Scales) -> Scales:
    return scales._replace(spread=jnp.ones_like(scales.spread))


def whole_deviation(scales: Scales) -> Scales:
    """Divided by the deviation itself, not by about its square root."""
    return scales._replace(spread=scales.spread**2)


SCALES: dict[str, Callable[[Scales], Scales]] = {
    "as in the package": lambda scales: scales,
    "groups of the row alone": plain,
    "centred": centred,
    "centred, whole deviation": whole_deviation,
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quantisation", description="Measure smaller rows and indexes."
    )
    add = parser.add_argument
    add(
        "--models",
        type=Path,
        nargs="+",
        help="folders, or names of embedded models (default: those)",
    )
    add("--text", type=Path, default=CALIBRATION, help="read by the models")
    add("--tokens", type=int, default=1024, help="of the text, at most (default 1024)")
    add("--capacity", type=int, default=16384, help="slots of the index whose time is taken")
    add("--rounds", type=int, default=5, help="of the timing; the median counts (default 5)")
    add("--no-speed", action="store_true", help="accuracy only")
    add("--json", type=Path, default=RESULTS / "quantisation.json", help="result file")
    return parser


def main(argv: list[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    folders = options.models or [checkpoint.embedded(name) for name in checkpoint.EMBEDDED]
    text = read_text(str(options.text)).content
    result: dict[str, Any] = {
        "benchmark": "quantisation",
        "machine": machine.describe(),
        "text": options.text.name,
        "rows": {"outlier channels": row_errors([outliers(seed) for seed in range(3)])},
        "index": {},
        "speed": [],
    }
    for folder in folders:
        note(f"{folder.name}: reading the text")
        model = checkpoint.load(checkpoint.model_folder(str(folder)))
        assert model.tokenizer is not None
        tokens = model.tokenizer.encode(text)[: min(options.tokens, model.config.max_positions)]
        inputs, samples = read(model, tokens)
        result["rows"][folder.name] = row_errors(samples)
        result["index"][folder.name] = index_masses(model, inputs, samples)
    if not options.no_speed:
        result["speed"] = [speeds(options, group) for group in (1, 4)]
    write_json(options.json, result)
    print("\n\n".join([rows_table(result), index_table(result), speed_table(result)]))
    note(f"written to {options.json}")
    return 0


def outliers(seed: int, tokens: int = 1024, d: int = 128) -> Sample:
    """Keys as in large models: columns of unequal deviation, four of them with a large mean."""
    rng = np.random.default_rng(seed)
    deviation = np.exp(rng.normal(0, 0.5, d))
    keys = rng.normal(size=(2, tokens, d)) * deviation
    keys[:, :, rng.choice(d, 4, replace=False)] += 15 * rng.choice([-1, 1], 4)
    queries = rng.normal(size=(2, 2, tokens, d)) / deviation * 4 / np.sqrt(d)
    values = rng.normal(size=(2, tokens, d)) * np.exp(rng.normal(0, 0.3, d))
    return Sample(*(jnp.asarray(x, jnp.float32) for x in (queries, keys, values)))


def read(model: Model, tokens: list[int]) -> tuple[list[jax.Array], list[Sample]]:
    """Attention inputs [s, e] and the queries, keys and values of every layer."""
    plan, config = blueprint(model.config, model.dtype), model.config
    ids = jnp.asarray([tokens], jnp.int32)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]

    @jax.jit
    def run(params: Any, x: jax.Array) -> tuple:
        layer = plan.layer(params)
        a = layer.attention_input(x)
        queries = layer.query(a, positions)[0].swapaxes(0, 1)
        queries = queries.reshape(config.num_kv_heads, config.group_size, *queries.shape[1:])
        done = chunk_layer(layer, x, Span.whole(*ids.shape))
        keys, values = jnp.split(done.rows[0], 2, axis=-1)
        return done.x, a[0], Sample(queries, keys, values)

    x = plan.embedding(model.params["embedding"]).embed(ids, positions)
    inputs, samples = [], []
    for params in model.params["layers"]:
        x, a, sample = run(params, x)
        inputs.append(a)
        samples.append(sample)
    return inputs, samples


def weights_of(queries: jax.Array, keys: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention weights [k, g, n, s] of the queries [k, g, n, d] at these positions."""
    scores = jnp.einsum("kgnd,ksd->kgns", queries, keys)
    seen = jnp.arange(keys.shape[1], dtype=jnp.int32)[None] <= positions[:, None]
    return jax.nn.softmax(jnp.where(seen[None, None], scores, MASKED), axis=-1)


def row_errors(samples: list[Sample]) -> list[dict[str, Any]]:
    """Mean over the layers of |o - o^| / |o|, for every format and every choice of scales."""
    entries = []
    for name in ("int8", "int4"):
        form = row_format(name, jnp.float32, samples[0].keys.shape[-1])
        for label in SCALES:
            errors = [float(row_error(form, label, sample)) for sample in samples]
            entry = {"rows": name, "scales": label, "bytes": form.width, "d": form.head_dim}
            entries.append(entry | {"attention_error": statistics.fmean(errors)})
    return entries


@functools.partial(jax.jit, static_argnums=(0, 1))
def row_error(form: RowFormat, label: str, sample: Sample) -> jax.Array:
    tokens, d = sample.keys.shape[1:]
    rows = jnp.concatenate([sample.keys, sample.values], axis=-1)[None]
    scales = SCALES[label](form.fit(rows, jnp.asarray([tokens // 2], jnp.int32)))
    stored = form.decode(scales, form.encode(scales, rows))[0]
    positions = jnp.arange(tokens // 2, tokens, EVERY, dtype=jnp.int32)

    def attend(_: None, position: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        slot = jnp.arange(tokens, dtype=jnp.int32)
        fetched = (slot >= SINKS) & (slot <= position - RECENT)
        outputs = []
        for used in (rows[0], jnp.where(fetched[None, :, None], stored, rows[0])):
            query = sample.queries[:, :, position][:, :, None]
            weights = weights_of(query, used[..., :d], position[None])
            outputs.append(jnp.einsum("kgns,ksd->kgnd", weights, used[..., d:]))
        return None, (outputs[0], outputs[1])

    _, (exact, approximate) = jax.lax.scan(attend, None, positions)
    return jnp.linalg.norm(exact - approximate) / jnp.linalg.norm(exact)


def index_masses(
    model: Model, inputs: list[jax.Array], samples: list[Sample]
) -> list[dict[str, Any]]:
    """Mean over the layers but the first, whose input has no layer before it."""
    d, entries = model.config.head_dim, []
    for name, ratio in INDEXES:
        form = IndexFormat(name, partial_columns(d, ratio))
        masses = [
            float(index_mass(model, form, number, inputs[number - 1], samples[number]))
            for number in range(1, len(samples))
        ]
        size = form.entries * form.dtype.itemsize
        entry = {"index": name, "ratio": ratio, "bytes": size, "d": d}
        entries.append(entry | {"attention_mass": statistics.fmean(masses)})
    return entries


def index_mass(
    model: Model, form: IndexFormat, number: int, a: jax.Array, sample: Sample
) -> jax.Array:
    """Attention mass of the best 5 % of the tokens by the index, over that of the best 5 %."""
    tokens, config = sample.keys.shape[1], model.config
    positions = jnp.arange(tokens // 2, tokens, EVERY, dtype=jnp.int32)
    weights = speculation_weights(model, number, form.columns, centred=form.quantised)
    count = int(SHARE * tokens // 2)

    @jax.jit
    def run(params: Any, a: jax.Array, sample: Sample) -> jax.Array:
        layer = blueprint(config, model.dtype).layer(params)
        index = form.encode(partial_keys(weights, sample.keys[None], form.columns))
        query = speculate_query(config, layer, weights, a[positions], positions, form.columns)
        index = jnp.broadcast_to(index, (len(positions), *index.shape[1:]))
        scores = form.scores(query, index).transpose(1, 2, 0, 3)
        slot = jnp.arange(tokens, dtype=jnp.int32)[None]
        fetched = (slot >= SINKS) & (slot <= positions[:, None] - RECENT)
        guessed = jax.nn.softmax(jnp.where(fetched[None, None], scores, MASKED), axis=-1)
        true = weights_of(sample.queries[:, :, positions], sample.keys, positions)
        true = jnp.sum(jnp.where(fetched[None, None], true, 0), axis=1)
        chosen = jax.lax.top_k(jnp.sum(guessed, axis=1), count)[1]
        found = jnp.sum(jnp.take_along_axis(true, chosen, axis=-1), axis=-1)
        return jnp.mean(found / jnp.sum(jax.lax.top_k(true, count)[0], axis=-1))

    return run(model.params["layers"][number], a, sample)


def speeds(options: argparse.Namespace, group: int) -> dict[str, Any]:
    """Milliseconds to score one layer of 8 KV heads, at r columns of the index."""
    rng, heads = np.random.default_rng(0), 8
    cases = []
    for name, columns in SPEED:
        form = IndexFormat(name, columns)
        query = rng.normal(size=(1, heads, group, columns))
        keys = jnp.asarray(rng.normal(size=(1, heads, columns, options.capacity)), jnp.float32)
        index = jax.jit(form.encode)(keys)
        # More bytes than a processor caches: a step visits every layer before it comes back.
        copies = [index] + [jnp.array(index) for _ in range(max(2, (1 << 26) // index.nbytes))]
        run = jax.jit(form.scores)
        run(jnp.asarray(query, jnp.float32), index).block_until_ready()
        cases.append((form, run, jnp.asarray(query, jnp.float32), copies, []))
    for _ in range(options.rounds):
        for _, run, query, copies, times in cases:
            for index in copies:
                start = time.perf_counter()
                run(query, index).block_until_ready()
                times.append(time.perf_counter() - start)
    entries = [
        {
            "index": form.name,
            "columns": form.columns,
            "bytes": copies[0].nbytes,
            "milliseconds": 1e3 * statistics.median(times),
        }
        for form, _, _, copies, times in cases
    ]
    return {"capacity": options.capacity, "kv_heads": heads, "group": group, "times": entries}


if __name__ == "__main__":
    sys.exit(main())
