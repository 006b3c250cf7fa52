"""Long contexts: memory that does not grow with them, and rows at the end of 128k tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import SPARSE, engine, random_model
from scipy.special import softmax
from tiny import normal

from benchmarks.prefill import temporaries
from infinigen_jax.cache.host_array import (
    allocate_host,
    gather_rows,
    write_span,
)
from infinigen_jax.models import blueprint
from infinigen_jax.ops.span import Span
from infinigen_jax.policies import InfiniGen
from infinigen_jax.policies.base import Lookup
from infinigen_jax.prefill.attention import attend_chunk
from infinigen_jax.prefill.layer import host_rows

CHUNK = 256


@pytest.mark.parametrize(
    ("rows", "batch"), [("int4", 1), pytest.param("auto", 3, marks=pytest.mark.slow)]
)
def test_temporaries_do_not_grow_with_the_prompt(rows, batch):
    """From 16 chunks to a million tokens, only the cache grows; on the device, the index."""
    chosen = engine("gqa", SPARSE, 1, rows=rows)
    short, long = (temporaries(chosen, CHUNK, n * CHUNK, batch) for n in (16, 4096))
    assert len(short) == 4  # of a layer on the host and one on the device: itself, what it keeps
    assert (np.array(long) <= 1.01 * np.array(short)).all()
    assert 0 < max(long) < 2**27


def test_a_chunk_at_the_end_of_128k_tokens():
    """Against dense attention in float64: slots, masks and blocks of earlier rows."""
    tokens, chunk = 131072, 64
    decoder = engine("gqa", SPARSE).decoder
    k, h, d = decoder.config.num_kv_heads, decoder.config.num_heads, decoder.config.head_dim
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(1, k, tokens, 2 * d)).astype(np.float32)
    q = rng.normal(size=(1, chunk, h, d)).astype(np.float32)
    start = tokens - chunk
    host = allocate_host((2, 1, k, tokens, 2 * d), jnp.float32, decoder.mesh)
    write = jax.jit(functools.partial(write_span, mesh=decoder.mesh), donate_argnums=0)
    whole = Span.whole(1, 4096)
    for at in range(0, start, 4096):
        new = jnp.asarray(rows[:, :, at : at + 4096])
        host = write(host, jnp.int32(1), new, Span(whole.start + at, whole.count))
    wanted = np.array([[[3, tokens // 2 + 5, tokens - 1], [7, tokens // 2, tokens - 8]]], np.int32)
    fetched = jax.jit(functools.partial(gather_rows, mesh=decoder.mesh))(host, jnp.int32(1), wanted)
    np.testing.assert_array_equal(fetched, np.take_along_axis(rows, wanted[..., None], axis=2))
    span = Span(jnp.array([start], jnp.int32), jnp.array([chunk], jnp.int32))

    @jax.jit
    def attend(host, q, keys, values):
        earlier = host_rows(decoder, host, jnp.int32(1), (), span)
        return attend_chunk(q, keys, values, earlier).output

    given = np.split(rows[:, :, start:].swapaxes(1, 2), 2, axis=-1)
    got = np.asarray(attend(host, jnp.asarray(q), *(jnp.asarray(x) for x in given)))
    keys, values = np.split(rows[0].astype(np.float64), 2, axis=-1)
    for head, row in ((0, 0), (h - 1, 17), (1, chunk - 1)):
        kv = head // (h // k)
        scores = keys[kv, : start + row + 1] @ q[0, row, head].astype(np.float64)
        expected = softmax(scores) @ values[kv, : start + row + 1]
        np.testing.assert_allclose(got[0, row, head], expected, atol=1e-5)


@pytest.mark.slow
def test_an_index_of_128k_tokens_chooses_what_numpy_does():
    """By the true query of the last token, with its rotary position; all that alpha lets pass."""
    tokens, alpha = 131072, 2.0
    model = random_model("gqa")
    config, at = model.config, jnp.array([tokens - 1], jnp.int32)
    exact = {"index_dtype": "float32", "partial_ratio": 1.0}
    asked = InfiniGen(**exact, query="own", tail=False, alpha=alpha, budget=0.1)
    policy = asked.fitted(model, True, False)
    weights = policy.prepare(model, 0)
    k, d = config.num_kv_heads, config.head_dim
    keys = normal(1, k, tokens, d)
    state, append = policy.init(config, 1, tokens), jax.jit(policy.append)
    for start in range(0, tokens, 1 << 15):
        span = Span(jnp.array([start], jnp.int32), jnp.array([1 << 15], jnp.int32))
        state = append(weights, state, jnp.asarray(keys[:, :, start : start + (1 << 15)]), span)
    layer = blueprint(config, model.dtype).layer(model.params["layers"][0])
    a = jnp.asarray(normal(1, config.hidden_size, seed=1))
    size = policy.request_size(tokens)
    select = jax.jit(
        lambda a, state: policy.select(Lookup(config, layer, weights, state, a, at, size, tokens))
    )
    request = select(a, state)
    query = np.asarray(config.grouped(layer.query(a, at)))[0]
    for head in range(k):
        scores = query[head] @ keys[0, head].T
        scores[:, : policy.sinks] = scores[:, tokens - policy.window :] = -np.inf
        distance = scores - scores.max(axis=-1, keepdims=True) + alpha
        assert np.abs(distance).min() > 1e-5  # float32 decides as NumPy does
        expected = np.flatnonzero((distance > 0).any(axis=0))
        count = int(request.count[0, head])
        assert 3 < len(expected) == count < tokens // 10
        assert sorted(np.asarray(request.slots)[0, head, :count].tolist()) == expected.tolist()
        assert expected.max() > 100_000
