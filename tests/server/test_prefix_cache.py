"""The prefix cache gives back the state that reading a prompt leaves, within its limit."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from runtime import SPARSE, TAILED, engine, random_model

from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.live_batch import Reading
from infinigen_jax.engine.saved_file import kept
from infinigen_jax.policies import H2O, Policy, Quest
from infinigen_jax.prefill.prefill import empty_cache
from infinigen_jax.server.prefix_cache import Node, PrefixCache

CAPACITY, CHUNK = 256, 64
LONG = dataclasses.replace(TAILED, window=100)  # bfloat16, too
PROMPT = np.random.default_rng(0).integers(3, 96, 150).astype(np.int32)


def prepared(policy: Policy, **settings: Any) -> tuple[Engine, PrefixCache]:
    made = engine("one", policy, 0, prefill_chunk=CHUNK, **settings)
    return made, PrefixCache(made.decoder, CAPACITY, CHUNK, 1 << 24)


def read(
    made: Engine, prefixes: PrefixCache, tokens: np.ndarray, host: jax.Array | None = None
) -> tuple[Reading, int]:
    """Read a prompt like the scheduler; return also the number of cached tokens."""
    node = prefixes.find(tokens)
    done = node.end
    cache = prefixes.restore(node, empty_cache(made.decoder, 1, CAPACITY, host=host))
    reading = Reading(made.runtime, tokens, cache, CHUNK, done)
    while not reading.complete:
        reading.advance()
        node = None if node is None else prefixes.store(node, reading)
    return reading, done


def stored(prefixes: PrefixCache, tokens: np.ndarray) -> int:
    return prefixes.find(np.append(tokens, tokens[:1])).end


@pytest.mark.parametrize(
    "policy, settings",
    [
        pytest.param(SPARSE, {}, id="exact"),
        pytest.param(LONG, {}, id="window-of-several-chunks"),
        pytest.param(TAILED, {"rows": "int8", "hot_set": 1.5}, id="int8-tail"),
        pytest.param(dataclasses.replace(TAILED, tail_tokens=1), {}, id="tail-by-token"),
        pytest.param(Quest(budget=0.2, window=4), {}, id="bounds-of-pages"),
        pytest.param(Quest(budget=0.2, window=4, page=1), {}, id="page-1", marks=pytest.mark.slow),
        pytest.param(H2O(budget=0.2, window=4), {}, id="observing", marks=pytest.mark.slow),
    ],
)
def test_restored_states_are_equal_bits(policy, settings):
    model = random_model("one", "bfloat16" if policy is LONG else "float32")
    made = Engine(model, policy=policy, dense_layers=0, prefill_chunk=CHUNK, **settings)
    prefixes = PrefixCache(made.decoder, CAPACITY, CHUNK, 1 << 24)
    whole, cached = read(made, prefixes, PROMPT)
    assert cached == 0
    used = read(made, prefixes, np.tile(PROMPT[::-1], 2)[:250])[0].cache.host
    again, cached = read(made, prefixes, PROMPT, used)  # in the host array of another prompt
    assert cached == 128
    one, two = (
        (r.predicted, r.cache._replace(host=None, hot=()), np.asarray(r.cache.host)[..., :150, :])
        for r in (whole, again)
    )
    jax.tree.map(np.testing.assert_array_equal, one, two)
    longer = np.concatenate([PROMPT, PROMPT[:30]])
    exact = made.decoder.row_format.exact
    assert read(made, prefixes, longer)[1] == (150 if exact else 128)


@pytest.mark.parametrize("policy", [SPARSE, TAILED], ids=["rows", "sums-of-blocks"])
def test_chunks_at_the_end_of_the_capacity_are_restored(policy):
    """Chunks are written whole, and the last one would exceed the capacity."""
    made, prefixes = prepared(policy)
    tokens = np.random.default_rng(1).integers(3, 96, CAPACITY - 2).astype(np.int32)
    for end in (212, 250):
        reading, _ = read(made, prefixes, tokens[:end])
    node = prefixes.find(tokens)
    restored = prefixes.restore(node, empty_cache(made.decoder, 1, CAPACITY))
    assert node.end == 250
    one, two = (np.asarray(c.host)[..., :250, :] for c in (reading.cache, restored))
    np.testing.assert_array_equal(one, two)
    jax.tree.map(np.testing.assert_array_equal, kept(reading.cache), kept(restored))


def test_a_chunk_takes_as_much_memory_wherever_it_is():
    made, prefixes = prepared(TAILED)
    tokens = np.tile(PROMPT, 2)[: 4 * CHUNK]
    read(made, prefixes, tokens)
    sizes = [node.bytes for node in prefixes.find(np.append(tokens, tokens[:1])).chain()]
    assert len(sizes) == 4 and sizes[1] == sizes[2] == sizes[3] >= sizes[0]


def test_recent_rows_take_no_memory_of_their_own():
    """They are found among the rows of the chunks."""
    sizes = set()
    for window in (4, 32):
        made, prefixes = prepared(dataclasses.replace(SPARSE, window=window))
        read(made, prefixes, PROMPT)
        sizes.add(prefixes.bytes)
    assert len(sizes) == 1


def test_the_least_recently_used_chunks_are_evicted():
    made, everything = prepared(SPARSE)
    other = PROMPT[::-1].copy()
    read(made, everything, PROMPT)
    limit = everything.bytes
    prefixes = PrefixCache(made.decoder, CAPACITY, CHUNK, limit)
    for tokens in (PROMPT, other[:64], PROMPT[:65]):
        read(made, prefixes, tokens)
        assert 0 < prefixes.bytes <= limit
    # The end of the first prompt made room for the other one.
    assert stored(prefixes, PROMPT) < 150 and stored(prefixes, other[:64]) == 64
    read(made, prefixes, other)
    assert stored(prefixes, other) > 64
    for limit in (10, everything.bytes // 2):  # no chunk, and not all of them
        small = PrefixCache(made.decoder, CAPACITY, CHUNK, limit)
        read(made, small, PROMPT)
        assert small.bytes <= limit and bool(small.bytes) == bool(stored(small, PROMPT))


@pytest.mark.parametrize("rows", ["auto", "int8"])
def test_warming_up_leaves_nothing(rows):
    """Also where chunks of this length are not stored: a part of one, in quantised rows."""
    made, prefixes = prepared(SPARSE, rows=rows)
    for length in (CHUNK, CHUNK // 2):
        cache = empty_cache(made.decoder, 1, CAPACITY)
        reading = Reading(made.runtime, PROMPT[:length], cache, CHUNK)
        reading.advance()
        prefixes.warm_up(reading)
        assert prefixes.bytes == 0
    assert prefixes.find(PROMPT).end == 0


def test_the_nodes_of_a_very_long_prompt():
    nodes = [Node(None, PROMPT[:0])]
    for _ in range(2000):
        nodes.append(Node(nodes[-1], PROMPT[:2]))
    assert nodes[-1].chain() == nodes[1:] and nodes[-1].end == 4000
    assert nodes[0].chain() == []
