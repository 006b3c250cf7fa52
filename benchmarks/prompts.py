"""A prompt read once and shared by all systems of this package.

A long prompt takes longer to read than all the measurements behind it. What a layer caches of it
does not depend on the policy, so it is computed once, sequence by sequence, and every engine's
cache is filled from that, by the functions that its own prefill uses.
"""

import functools
import time
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax import prompt_reader
from infinigen_jax.cache import Cache, DenseLayer
from infinigen_jax.carry import Weights
from infinigen_jax.checkpoint import Model
from infinigen_jax.decode import Decoder
from infinigen_jax.engine import Engine
from infinigen_jax.memory import Placement, default_mesh
from infinigen_jax.models import ModelConfig, blueprint
from infinigen_jax.prefill import empty_cache
from infinigen_jax.prompt_layer import chunk_layer, keep_rows
from infinigen_jax.prompt_steps import prefill_steps
from infinigen_jax.run import Run
from infinigen_jax.span import Span


class Prompt(NamedTuple):
    """Prompts of one length, as the model sees them.

    Attributes:
        tokens: of each sequence.
        rows: keys and values of each layer, [b, k, s, 2d], on the device.
        last: [b, e], the last layer's output for the last token.
        seconds: that reading took.
    """

    tokens: list[list[int]]
    rows: list[jax.Array]
    last: jax.Array
    seconds: float


def row_bytes(model: Model) -> int:
    """Of one token of one sequence, in all layers."""
    config = model.config
    return config.num_layers * config.num_kv_heads * 2 * config.head_dim * model.dtype.itemsize


def read(model: Model, tokens: list[list[int]]) -> Prompt:
    """Run the prompts through the model. Temporaries are those of one sequence and layer."""
    start = time.perf_counter()
    embed, layer = _reading(model.config, model.dtype)
    at = Placement(default_mesh())
    batch, length = len(tokens), len(tokens[0])
    config = model.config
    shape = (batch, config.num_kv_heads, length, 2 * config.head_dim)
    rows = [
        jax.device_put(jnp.zeros(shape, model.dtype), at.rows) for _ in range(config.num_layers)
    ]
    last = []
    for sequence, ids in enumerate(tokens):
        x = embed(model.params["embedding"], jnp.asarray([ids], jnp.int32))
        for i, params in enumerate(model.params["layers"]):
            x, rows[i] = layer(params, x, rows[i], jnp.int32(sequence))
        last.append(x[:, -1])
    prompt = Prompt(tokens, rows, jax.device_put(jnp.concatenate(last), at.batch), 0.0)
    jax.block_until_ready(prompt.last)
    return prompt._replace(seconds=time.perf_counter() - start)


def start(engine: Engine, prompt: Prompt, new_tokens: int) -> Run:
    """`engine.start`, with the prompt's cache filled in and not computed."""
    # Some policies learn from queries, which are not kept; some layers attend to a window.
    if engine.decoder.policy.observes or engine.model.config.sliding_layers:
        return engine.start(prompt.tokens, new_tokens)
    with mock.patch.object(prompt_reader, "prefill", functools.partial(_fill, prompt)):
        return engine.start(prompt.tokens, new_tokens)


@functools.cache
def _reading(config: ModelConfig, dtype: Any) -> tuple[Any, Any]:
    plan = blueprint(config, dtype)

    def embed(params: Any, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return plan.embedding(params).embed(tokens, positions)

    def layer(params: Any, x: jax.Array, rows: jax.Array, sequence: jax.Array) -> tuple:
        done = chunk_layer(plan.layer(params), x, Span.whole(1, x.shape[1]))
        zero = jnp.int32(0)
        return done.x, jax.lax.dynamic_update_slice(rows, done.rows, (sequence, zero, zero, zero))

    return jax.jit(embed), jax.jit(layer, donate_argnums=(1, 2))


def _fill(
    prompt: Prompt,
    decoder: Decoder,
    weights: Weights,
    prompts: np.ndarray,
    lengths: np.ndarray,
    capacity: int,
    sampling: Any,
    seed: jax.Array,
    *_: Any,
) -> tuple[Cache, jax.Array]:
    """Stands in for `infinigen_jax.prefill.prefill`."""
    cache = empty_cache(decoder, len(prompts), capacity)
    run, store, at = prefill_steps(decoder), _storing(decoder), Placement(decoder.mesh)
    local, states, scales = list(cache.local), list(cache.states), list(cache.scales)
    host, span = cache.host, Span(cache.lengths, jax.device_put(lengths, at.batch))
    for i, rows in enumerate(prompt.rows):
        number = decoder.host_number(i)
        if number < 0:
            local[i] = store.dense(local[i], rows, span)
            continue
        local[i], states[number], scales[number], host = store.host(
            weights.policy[number],
            rows,
            span,
            local[i],
            states[number],
            scales[number],
            host,
            jnp.int32(number),
            streams=decoder.streams(number),
        )
    drawn = run.draw(
        weights.params["embedding"], prompt.last, seed, jnp.zeros_like(span.start), sampling
    )
    filled = Cache(host, tuple(states), tuple(local), span.end, tuple(scales), cache.hot)
    return filled, drawn


class _Storing(NamedTuple):
    dense: Any
    host: Any


@functools.lru_cache(maxsize=64)
def _storing(decoder: Decoder) -> _Storing:
    at = Placement(decoder.mesh)
    return _Storing(
        jax.jit(DenseLayer.extend, donate_argnums=0, out_shardings=at.rows),
        jax.jit(
            functools.partial(keep_rows, decoder),
            static_argnames="streams",
            donate_argnums=(3, 4, 6),
            out_shardings=(at.rows, at.rows, at.rows, at.host),
        ),
    )
