"""Two-byte numbers on the CPU: kept as integers, so that XLA converts no cache as a whole."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import SPARSE, random_model

from benchmarks.prefill import cache_shapes
from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import Placement, default_mesh
from infinigen_jax.decode.compiler_options import step_options
from infinigen_jax.decode.steps import steps
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.saved_file import SavedFile
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill.compiled import keep_on_device
from infinigen_jax.transfer import Transfer

CAPACITY = 1 << 20  # from shapes alone: no index overflows


def step(engine: Engine, cache: Cache) -> Any:
    return steps(engine.decoder).fused.lower(
        engine.runtime.weights, *cache.parts(False), cache.lengths
    )


def flush(engine: Engine, cache: Cache) -> Any:
    decoder = engine.decoder
    layer, number = decoder.on_host[0], jnp.int32(0)
    arguments = (engine.runtime.weights.policy[0], number, cache.host, cache.states[0])
    rest = (cache.local[layer], cache.scales[0], cache.lengths)
    return steps(decoder).flush.lower(*arguments, *rest, streams=False)


def device_layer(engine: Engine, cache: Cache) -> Any:
    """Keeping a chunk's rows in a layer on the device."""
    at, config, c = Placement(default_mesh()), engine.decoder.config, 256
    rows = (1, config.num_kv_heads, c, 2 * config.head_dim)
    rows = jax.ShapeDtypeStruct(rows, engine.decoder.dtype, sharding=at.rows)
    span = Span(cache.lengths, cache.lengths)
    chunks = engine.decoder.of_chunks
    return keep_on_device.of(chunks).lower(cache.local[0], rows, span)


def largest_numbers(hlo: str) -> int:
    """Elements of the largest floating-point array that a compiled program makes."""
    made = re.findall(r"= (?:f32|bf16|f16)\[([\d,]+)\]\S* (?!parameter|get-tuple)", hlo)
    return max((int(np.prod([int(n) for n in shape.split(",")])) for shape in made), default=0)


@pytest.mark.parametrize(
    "program, dtype",
    [(step, "bfloat16"), (flush, "bfloat16"), (device_layer, "bfloat16"), (flush, "float16")],
)
def test_no_program_converts_a_cache(program, dtype):
    """A product takes its factors in float32: a layer on the device is as much as is converted."""
    dense_layers = int(program is device_layer)
    # A step of one layer: one of two takes twice as long to compile.
    name = "one" if program is step else "gqa"
    engine = Engine(random_model(name, dtype), policy=SPARSE, dense_layers=dense_layers)
    cache = cache_shapes(engine.decoder, 1, CAPACITY)
    assert cache.host is not None and cache.host.dtype == jnp.uint16
    compiled = program(engine, cache).compile()
    layer = cache.host.size // cache.host.shape[0]
    assert largest_numbers(compiled.as_text()) < layer
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * cache.host.size


def test_a_cache_of_numbers_would_be_converted():
    engine = Engine(random_model("gqa", "bfloat16"), policy=SPARSE, dense_layers=0)
    decoder = dataclasses.replace(engine.decoder, transfer=Transfer(in_place=False))
    engine.runtime = dataclasses.replace(engine.runtime, decoder=decoder)
    cache = cache_shapes(engine.decoder, 1, CAPACITY)
    assert cache.host is not None and cache.host.dtype == jnp.bfloat16
    assert largest_numbers(flush(engine, cache).compile().as_text()) >= cache.host.size


def test_weights_are_converted_one_after_the_other():
    def step(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return x

    layout = Engine(random_model("gqa", "bfloat16"), policy=SPARSE).decoder
    weights, x = [jnp.ones((512, 512), jnp.bfloat16)] * 8, jnp.ones((1, 512), jnp.bfloat16)
    compiled = jax.jit(step, compiler_options=step_options(layout)).lower(weights, x).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2 * 4 * 512 * 512


def test_a_saved_conversation_has_numbers(tmp_path):
    """The file does not depend on the machine's representation."""
    engine = Engine(random_model("windows", "bfloat16"), policy=SPARSE, dense_layers=1)
    conversation = engine.conversation(context=100)
    list(conversation.turn(list(range(3, 40)), 1, ignore_eos=True))
    conversation.save(tmp_path / "talk")
    assert SavedFile(tmp_path / "talk")._file.tensors["host.0"].dtype == jnp.bfloat16
    resumed = engine.resume(tmp_path / "talk")
    resumed.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "talk").read_bytes()
    answers = [
        [step.tokens for step in talk.turn([5, 6], 1, ignore_eos=True)]
        for talk in (conversation, resumed)
    ]
    assert answers[0] == answers[1]
    caches = [talk.run.cache for talk in (conversation, resumed) if talk.run is not None]
    one, two = (np.asarray(cache.local[0][0])[:, :, :39] for cache in caches)
    np.testing.assert_array_equal(one, two)
