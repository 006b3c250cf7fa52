"""Generation with a limited host cache: against none, against masks, and its memory."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import ALL, NEW, RAGGED, SPARSE, engine, plain_pass, random_model, score, slow
from tiny import refuses

from infinigen_jax import Engine, Pool, Run
from infinigen_jax.cache.layers import Resident
from infinigen_jax.engine.memory_plan import step_bytes
from infinigen_jax.policies import POLICIES, Full, Window

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
        scores.append(score(run, tokens, targets))
        each(run)
    return run, np.stack(scores, axis=1)


def live(run: Run) -> list[list[list[np.ndarray]]]:
    """Return the positions that host layers, sequences and KV heads can attend to in the last step.

    They are in the pool or on the device.
    """
    resident = np.asarray(run.decoder.slots.positions(run.cache.lengths - 1))
    found = []
    for positions in map(np.asarray, run.cache.pool):
        both = [[np.union1d(head, resident[i]) for head in row] for i, row in enumerate(positions)]
        found.append([[head[head >= 0] for head in row] for row in both])
    return found


@pytest.mark.parametrize(
    ("policy", "eviction"), [slow(Full(window=4), "fifo"), (ALL, "lru")], ids=["full", "infinigen"]
)
def test_evicted_rows_are_masked_in_full_attention(policy, eviction):
    """Every live row is fetched, so attention is over exactly the live rows."""
    made = engine("one", policy, 0, pool=Pool(tokens=14, eviction=eviction, sinks=2))
    seen: list[Any] = []
    _, scores = scored(made, 15, lambda run: seen.append(live(run)[0]))
    for i, prompt in enumerate(PROMPTS):
        steps = np.arange(len(prompt), len(prompt) + len(seen))
        mask = np.ones((2, len(TOKENS[i]), len(TOKENS[i])), bool)  # prompts attend to themselves
        for position, heads in zip(steps, seen, strict=True):
            for head, rows in enumerate(heads[i]):
                assert len(rows) <= 14 + policy.window + policy.sinks
                assert position < 20 or len(rows) < position + 1  # some rows were evicted
                mask[head, position] = np.isin(np.arange(len(TOKENS[i])), rows)
        model = random_model("one")
        each_query = np.repeat(mask, model.config.group_size, axis=0)[None]
        log_probs = plain_pass(model, TOKENS[i : i + 1], each_query)[1][0]
        expected = log_probs[steps, TOKENS[i, steps + 1]]
        np.testing.assert_allclose(scores[i], expected, atol=2e-3)


def test_slots_hold_the_rows_of_the_directory():
    """Rows, index and sums of the first layer equal those of a cache without a limit."""
    engines = (engine("one", TAIL, rows="int4", pool=pool) for pool in (None, SMALL))
    free, run = (scored(made, 30)[0] for made in engines)
    d = run.decoder.config.head_dim
    free.settle()
    run.settle()
    whole, mine = (np.asarray(r.cache.host)[0] for r in (free, run))
    positions = np.asarray(run.cache.pool[0])
    indexes = [r.cache.states[0] for r in (free, run)]
    indexes = [np.asarray(getattr(index, "keys", index)) for index in indexes]
    current = np.asarray(run.cache.lengths) - 1
    for i, j in np.ndindex(positions.shape[:2]):
        slots = np.flatnonzero(positions[i, j] >= 0)
        there = positions[i, j, slots]
        assert len(slots) == len(set(there.tolist())) == min(18, current[i] - 1)
        np.testing.assert_array_equal(mine[i, j, slots], whole[i, j, there])
        mine_index, whole_index = indexes[1][i, j][:, slots], indexes[0][i, j][:, there]
        np.testing.assert_allclose(mine_index, whole_index, rtol=1e-5, atol=1e-5)
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
    """Host array, index and directories have the slots of the pool, not of the context."""
    for policy in (TAIL, Full()):
        free, run = (
            engine("one", policy, rows="int4", pool=pool).start(PROMPTS, max_new_tokens=40)
            for pool in (None, SMALL)
        )
        assert run.cache.host.shape[3] == 18 and free.cache.host.shape[3] == 128
        assert run.cache.host.sharding.memory_kind == "pinned_host"
        stats = run.stats()
        assert stats.host_cache_bytes == run.cache.host.nbytes
        assert stats.pool_tokens == 18 and free.stats().pool_tokens == 0
        assert all(x.shape[3] == 18 for x in jax.tree.leaves(run.cache.states))
        assert stats.pool_bytes > 0
        assert stats.host_cache_bytes * 128 == free.stats().host_cache_bytes * 18
    assert free.plan.pool == 0 and free.cache.pool == ()


class Blocks(Window):
    """Policy whose tail is by position."""

    has_tail, tail_block = True, 4


def test_policies_that_cannot_have_a_limit():
    model = random_model("gqa")
    for name, kind in POLICIES.items():
        policy: Any = kind()
        if kind.pools:
            assert Engine(model, policy=policy, pool=SMALL).decoder.pool == SMALL
        else:
            message = f"policy {name} cannot have a limit; use full, .* or window"
            refuses(message, Engine, model, policy=policy, pool=SMALL)
    assert {name for name, kind in POLICIES.items() if not kind.pools} == {"h2o", "quest"}
    message = "policy window cannot have a limit and a `tail_block`"
    refuses(message, Engine, model, policy=Blocks(), pool=SMALL)
    made = engine("gqa", SPARSE, pool=Pool(tokens=5))
    refuses(r"pool\.tokens 5: .* use at least 6", made.start, RAGGED, max_new_tokens=NEW)


def test_scores_of_layers_on_the_device_are_planned_for_all_tokens():
    made = engine("gqa", SPARSE, 1)
    sizes = made.decoder, made.runtime.weights.params, 2
    scores = 2 * 4 * 2 * made.decoder.config.num_heads
    grown = step_bytes(*sizes, 8192, slots=64) - step_bytes(*sizes, 4096, slots=64)
    assert grown == scores * 4096
