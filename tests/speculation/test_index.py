"""The index in its dtypes: scores, and which tokens they find."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import random_model
from tiny import normal

from infinigen_jax.models import blueprint
from infinigen_jax.ops.span import Span
from infinigen_jax.policies import InfiniGen
from infinigen_jax.policies.base import Lookup
from infinigen_jax.settings.policy import INDEX_DTYPES
from infinigen_jax.speculation.index import BITS, IndexFormat
from infinigen_jax.speculation.query import partial_keys, speculation_weights

encode = jax.jit(IndexFormat.encode, static_argnums=0)
scores_of = jax.jit(IndexFormat.scores, static_argnums=0)


def random_keys(b=2, k=2, r=32, t=100, seed=0) -> jax.Array:
    return jnp.asarray(normal(b, k, r, t, seed=seed))


def random_query(b=2, k=2, g=3, r=32, seed=1) -> jax.Array:
    return jnp.asarray(normal(b, k, g, r, seed=seed))


@pytest.mark.parametrize("columns", [1, 13, 32])
@pytest.mark.parametrize("name", INDEX_DTYPES)
def test_scores_are_those_of_keys_off_by_half_a_step(name, columns):
    form = IndexFormat(name, columns)
    keys, query = random_keys(r=columns), random_query(r=columns)
    entries = encode(form, keys)
    assert entries.shape == (2, 2, form.entries, 100) and entries.dtype == form.dtype
    assert form.empty(2, 2, 100).shape == entries.shape
    scores = scores_of(form, query, entries)
    assert scores.shape == (2, 2, 3, 100) and scores.dtype == jnp.float32
    exact = np.einsum("bkgr,bkrt->bkgt", query, keys)
    off = np.abs(np.asarray(keys)).max(axis=2) * 2.0**-7
    if form.quantised:
        span = np.ptp(np.asarray(keys), axis=2) + off
        off = 0.5 * span / (2**BITS - 1) * (1 + 2.0**-7)
    weight = np.abs(np.asarray(query)).sum(axis=-1)
    assert (np.abs(scores - exact) <= weight[..., None] * off[:, :, None] + 1e-4).all()


def test_a_share_of_the_columns_fills_its_words():
    def columns(name: str, ratio: float, heads: tuple[int, ...] = (8, 32, 80, 128)) -> list[int]:
        return [IndexFormat.of_share(name, d, ratio).columns for d in heads]

    assert columns("int4", 0.75) == [8, 24, 64, 96]
    assert columns("float32", 0.3) == [2, 9, 24, 38], "the paper's"
    assert columns("float32", 0.01) == [1] * 4 and columns("int4", 0.01) == [8] * 4
    assert columns("int4", 1.0, (12,)) == [12]
    assert [IndexFormat("int4", r).entries for r in (1, 16, 38, 128)] == [2, 3, 6, 17]


def test_both_ways_of_scoring_agree():
    """The passes of the CPU and the reduction of the GPU."""
    form = IndexFormat("int4", 24)
    entries, query = encode(form, random_keys(r=24)), random_query(r=24)
    by_word = query.reshape(2, 2, 3, form.code_words, -1)
    step, start = (jnp.asarray(random_keys(r=heads)) for heads in (1, 3))

    def begin():
        return step, start

    one = jax.jit(lambda q, x: form._in_passes(q, x, begin, lambda x: x))(by_word, entries)
    other = jax.jit(lambda q, x: form._reduced(q, x, begin))(by_word, entries)
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", ["float32", "int4"])
@pytest.mark.parametrize("r", [24, 96])  # scored in one pass, and in a loop
def test_other_slots_have_no_score(name, r):
    form = IndexFormat(name, r)
    keys, query = np.array(random_keys(r=r)), random_query(r=r)
    keys[..., 3] = np.nan  # as of memory that was never written
    entries = encode(form, jnp.asarray(keys))
    eligible = jnp.arange(entries.shape[3]) % 3 > 0
    masked = jax.jit(form.scores)(query, entries, jnp.broadcast_to(eligible, (2, 1, len(eligible))))
    scores = jax.jit(form.scores)(query, entries)
    np.testing.assert_allclose(masked, np.where(eligible, scores, -np.inf), rtol=1e-5, atol=1e-5)


def test_appending_writes_the_entries_that_a_prompt_would():
    """In place, at each sequence's own position."""
    model = random_model("gqa")
    policy = InfiniGen(index_dtype="int4", partial_ratio=1.0)
    weights = policy.prepare(model, 1)
    keys = jnp.asarray(normal(2, 2, 24, 8, seed=2))
    read = jax.jit(
        lambda keys: policy.append(
            weights, policy.init(model.config, 2, 40), keys, Span.whole(2, keys.shape[2])
        )
    )
    whole, starts = read(keys), jnp.asarray([10, 6], jnp.int32)
    new = jnp.stack([keys[0, :, 10:20], keys[1, :, 6:16]])
    span = Span(starts, jnp.full(2, 10, jnp.int32))
    state = jax.jit(policy.append)(weights, read(keys[:, :, :10]), new, span)
    for sequence, stop in ((0, 20), (1, 16)):
        np.testing.assert_array_equal(state[sequence, ..., :stop], whole[sequence, ..., :stop])


def test_a_mean_key_is_left_out_of_an_integer_index():
    """It adds the same to all scores of a query, and would take the range that keys differ in."""
    model = random_model("gqa")
    mean = np.asarray(np.random.default_rng(5).normal(size=(2, 2, 8)) * 20, np.float32)
    model = dataclasses.replace(model, key_mean=mean)
    keys = random_keys(1, 2, 8).swapaxes(2, 3) + mean[1][None, :, None]
    query = random_query(1, 2, 2, 8)
    errors = {}
    for name in ("float32", "int4"):
        form = IndexFormat(name, 8)
        weights = speculation_weights(model, 1, 8, centred=form.quantised)
        assert ("centre" in weights) == form.quantised
        scores = scores_of(form, query, encode(form, partial_keys(weights, keys, 8)))
        errors[name] = scores - scores.mean(axis=-1, keepdims=True)
    assert np.abs(errors["int4"] - errors["float32"]).max() < 3
    assert np.abs(errors["float32"]).max() > 5


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
