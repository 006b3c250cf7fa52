"""Generation with a limited host cache: against none, against masks, and what it takes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import ALL, NEW, RAGGED, SPARSE, engine, random_model

from infinigen_jax.cache.layers import Resident
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.generation import Run
from infinigen_jax.errors import InputError
from infinigen_jax.models import blueprint
from infinigen_jax.policies import POLICIES, Full
from infinigen_jax.settings.pool import Pool

TAIL = dataclasses.replace(SPARSE, tail=True, tail_tokens=0)  # as with every pool
SMALL = Pool(tokens=18, sinks=3)
TOKENS = np.random.default_rng(8).integers(3, 96, (2, 70)).astype(np.int32)
PROMPTS = [TOKENS[0, :21].tolist(), TOKENS[1, :9].tolist()]  # one longer than the pool


def scored(engine: Engine, steps: int, each: Any = lambda run: None) -> tuple[Run, np.ndarray]:
    """Decode given tokens after PROMPTS; return their log-probabilities [b, steps]."""
    run = engine.start(PROMPTS, max_new_tokens=40)
    scores = []
    for step in range(steps):
        at = [len(p) + step for p in PROMPTS]
        tokens = np.array([TOKENS[i, n] for i, n in enumerate(at)])
        targets = np.array([TOKENS[i, n + 1] for i, n in enumerate(at)])
        scores.append(np.asarray(run.score(tokens, targets)))
        each(run)
    return run, np.stack(scores, axis=1)


def live(run: Run) -> list[list[list[np.ndarray]]]:
    """Positions that each host layer, sequence and KV head can attend to in the last step.

    What is in the pool, and what is on the device.
    """
    resident = np.asarray(run.decoder.slots.positions(run.cache.lengths - 1))
    found = []
    for positions in map(np.asarray, run.cache.pool):
        both = [[np.union1d(head, resident[i]) for head in row] for i, row in enumerate(positions)]
        found.append([[head[head >= 0] for head in row] for row in both])
    return found


def pieces(layer: Any) -> tuple[Any, Any]:
    """A layer's projections, and what comes after its attention, compiled."""

    def project(x: Any, at: Any) -> Any:
        a = layer.attention_input(x)
        return layer.query(a, at), *layer.key_value(a, at)

    def finish(x: Any, o: Any) -> Any:
        x = x + layer.attention_output(o)
        return x + layer.mlp(x)

    return jax.jit(project), jax.jit(finish)


class Masked:
    """The model on one sequence, token by token in NumPy; each KV head attends to given tokens."""

    def __init__(self, name: str):
        model = random_model(name)
        architecture = blueprint(model.config, model.dtype)
        self.config = model.config
        self.layers = [architecture.layer(params) for params in model.params["layers"]]
        self.ends = architecture.embedding(model.params["embedding"])
        self.pieces = [pieces(layer) for layer in self.layers]
        self.log_probs = jax.jit(lambda x: jax.nn.log_softmax(self.ends.logits(x)[0]))
        self.rows: list[list[Any]] = [[] for _ in self.layers]  # keys, values by position

    def step(self, token: int, position: int, allowed: dict[int, list[np.ndarray]]) -> np.ndarray:
        """Log-probabilities of the next token; all of the past in layers that are not `allowed`."""
        at = jnp.array([position], jnp.int32)
        x = self.ends.embed(jnp.array([token], jnp.int32), at)
        group = self.config.group_size
        for i, (project, finish) in enumerate(self.pieces):
            query, *row = (np.asarray(part)[0] for part in project(x, at))
            self.rows[i].append(row)
            keys, values = (np.stack([row[part] for row in self.rows[i]]) for part in (0, 1))
            outputs = []
            for head in range(self.config.num_heads):
                kv = head // group
                seen = allowed[i][kv] if i in allowed else np.arange(position + 1)
                scores = keys[seen, kv] @ query[head]
                weights = np.exp(scores - scores.max())
                outputs.append(weights @ values[seen, kv] / weights.sum())
            x = finish(x, np.stack(outputs)[None])
        return np.asarray(self.log_probs(x))


@pytest.mark.parametrize(
    "policy, eviction",
    [
        pytest.param(Full(window=4), "fifo", id="full", marks=pytest.mark.slow),
        pytest.param(ALL, "lru", id="infinigen"),
    ],
)
def test_evicted_rows_are_masked_in_full_attention(policy, eviction):
    """Every live row is fetched, so attention is over exactly the live rows."""
    steps = 15
    made = engine("one", policy, 0, pool=Pool(tokens=14, eviction=eviction, sinks=2))
    seen = []
    _, scores = scored(made, steps, lambda run: seen.append(live(run)))
    for i, prompt in enumerate(PROMPTS):
        model = Masked("one")
        for position, token in enumerate(prompt):
            model.step(token, position, {})  # prompts attend to all of themselves
        for step in range(steps):
            position = len(prompt) + step
            allowed = {layer: heads[i] for layer, heads in enumerate(seen[step])}
            sizes = [len(head) for heads in allowed.values() for head in heads]
            assert max(sizes) <= 14 + policy.window + policy.sinks
            assert position < 20 or max(sizes) < position + 1  # something is gone
            got = model.step(int(TOKENS[i, position]), position, allowed)
            assert got[TOKENS[i, position + 1]] == pytest.approx(scores[i, step], abs=2e-3)


def test_slots_hold_the_rows_of_the_directory():
    """Rows, index and sums of the first layer equal those of a cache without a limit."""
    free, run = (
        scored(engine("one", TAIL, rows="int4", pool=pool), 30)[0] for pool in (None, SMALL)
    )
    d = run.decoder.config.head_dim
    free.settle()
    run.settle()
    assert run.cache.host is not None and free.cache.host is not None
    whole, mine = (
        np.asarray(jax.device_put(r.cache.host, jax.memory.Space.Device))[0] for r in (free, run)
    )
    positions = np.asarray(run.cache.pool[0])
    indexes = [r.cache.states[0] for r in (free, run)]
    indexes = [np.asarray(getattr(index, "keys", index)) for index in indexes]
    current = np.asarray(run.cache.lengths) - 1
    for i, j in np.ndindex(positions.shape[:2]):
        slots = np.flatnonzero(positions[i, j] >= 0)
        there = positions[i, j, slots]
        assert len(slots) == len(set(there.tolist())) == min(18, current[i] - 1)
        np.testing.assert_array_equal(mine[i, j, slots], whole[i, j, there])
        np.testing.assert_allclose(
            indexes[1][i, j][:, slots], indexes[0][i, j][:, there], rtol=1e-5, atol=1e-5
        )
        local = run.cache.local[0]
        assert isinstance(local, Resident) and local.left is not None
        # As if all slots held rows.
        stored = run.decoder.row_format.decode(run.cache.scales[0], jnp.asarray(mine))
        values = np.asarray(stored)[i, j, slots, d:]
        # Pooled rows that are resident as well count with the error of storing them.
        resident = there > current[i] - TAIL.window
        ring = run.decoder.slots.of(jnp.asarray(there[resident]))
        values[resident] -= np.asarray(local.rows)[i, j, np.asarray(ring), d:]
        np.testing.assert_allclose(local.left[i, j, 0], values.sum(axis=0), rtol=1e-4, atol=1e-4)


def test_the_limit_is_what_is_allocated():
    """Not the context: host array, index, hot set and directories have the pool's slots."""
    pool = Pool(tokens=18)
    for policy, settings in ((TAIL, {"hot_set": 1.0}), (Full(), {})):
        free = engine("one", policy, **settings).start(RAGGED, max_new_tokens=NEW)
        run = engine("one", policy, pool=pool, **settings).start(RAGGED, max_new_tokens=NEW)
        assert run.cache.host is not None and free.cache.host is not None
        assert run.cache.host.shape[3] == 18 and free.cache.host.shape[3] == 128
        assert run.cache.host.sharding.memory_kind == "pinned_host"
        stats = run.stats()
        assert stats.host_cache_bytes == run.cache.host.nbytes
        assert stats.pool_tokens == 18 and free.stats().pool_tokens == 0
        states = jax.tree.leaves(run.cache.states)
        assert stats.device_index_bytes == sum(x.nbytes for x in states)
        assert all(x.shape[3] == 18 for x in states)
        assert stats.pool_bytes > 0
        assert stats.host_cache_bytes * 128 == free.stats().host_cache_bytes * 18
    assert free.plan.pool == 0 and free.cache.pool == ()


def test_policies_that_cannot_have_a_limit():
    model = random_model("gqa")
    for name, kind in POLICIES.items():
        policy: Any = kind()
        if kind.pools:
            assert Engine(model, policy=policy, pool=SMALL).decoder.pool == SMALL
        else:
            message = f"policy {name} cannot have a limit; use .*full or"
            with pytest.raises(InputError, match=message):
                Engine(model, policy=policy, pool=SMALL)
    assert {name for name, kind in POLICIES.items() if not kind.pools} == {"h2o", "quest"}
    with pytest.raises(InputError, match=r"pool\.tokens 5: .* use at least 6"):
        engine("gqa", SPARSE, pool=Pool(tokens=5)).start(RAGGED, max_new_tokens=NEW)
