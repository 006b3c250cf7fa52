"""The host pool's directory against lists in plain Python."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinigen_jax.cache.host_array import Placement, default_mesh
from infinigen_jax.cache.hot_set import HotSet, forget, replacement
from infinigen_jax.cache.pool import (
    COUNTER_BITS,
    first_used,
    held,
    insert,
    of_prompt,
    touch,
)
from infinigen_jax.errors import InputError
from infinigen_jax.policies import Oracle
from infinigen_jax.selection.select import Request
from infinigen_jax.settings.pool import POOL_EVICTIONS, Pool
from infinigen_jax.transfer import XlaTransfer

B, K = 2, 2
# Eviction, size, window, sinks of the pool and of the device, share of recent rows.
CASES = [("fifo", 9, 3, 2, 0, 0.5), ("lru", 9, 3, 2, 2, 0.5), ("counter", 6, 4, 0, 1, 0.0)]
inserted = jax.jit(insert, static_argnums=(0, 5))
touched = jax.jit(touch, static_argnums=0)
after_prompt = jax.jit(of_prompt, static_argnums=(0, 2, 3, 4))
held_now = jax.jit(held, static_argnums=2)
forgotten = jax.jit(forget)


class Reference:
    """The pool of one KV head: a dictionary from position to what its eviction goes by."""

    def __init__(self, pool: Pool, size: int, window: int, kept: list[int]):
        self.pool, self.size, self.window = pool, size, window
        self.rows = {p: p if pool.eviction == "lru" else 0 for p in kept}

    def request(self, wanted: list[int], now: int) -> None:
        if self.pool.eviction == "lru":
            self.rows |= {p: now for p in wanted}
        if self.pool.eviction == "counter":
            self.rows |= {p: self.rows[p] + 1 for p in wanted}
            if wanted and max(self.rows[p] for p in wanted) == 2**COUNTER_BITS - 1:
                self.rows = {p: count // 2 for p, count in self.rows.items()}

    def insert(self, new: list[int], length: int) -> list[int]:
        """Insert positions and return the evicted ones."""
        free = self.size - len(self.rows)
        recent = min(int(self.size * self.pool.recent), self.size - self.pool.sinks)
        recent = max(recent, self.window)
        safe = [p for p in self.rows if p < self.pool.sinks or p >= length - recent]
        order = sorted((used, p) for p, used in self.rows.items() if p not in safe)
        gone = [p for _, p in order[: max(0, len(new) - free)]]
        for p in gone:
            del self.rows[p]
        self.rows |= {p: p if self.pool.eviction == "lru" else 0 for p in new}
        return gone


def contents(positions: jax.Array, used: jax.Array | None) -> list[list[dict[int, int]]]:
    """The rows of each KV head, as a Reference has them; every row in one slot."""
    where, by = np.asarray(positions), None if used is None else np.asarray(used)
    found = []
    for i in range(B):
        found.append([])
        for j in range(K):
            slots = np.flatnonzero(where[i, j] >= 0)
            values = np.zeros(len(slots)) if by is None else by[i, j, slots]
            rows = {int(p): int(u) for p, u in zip(where[i, j, slots], values, strict=True)}
            assert len(rows) == len(slots)
            found[i].append(rows)
    return found


@given(st.data())
@settings(max_examples=15)
def test_against_dictionaries(data):
    """Prompts of two lengths, then requests of what is there and flushes, in the engine's order."""
    draw = data.draw
    eviction, size, window, pool_sinks, device_sinks, recent = draw(st.sampled_from(CASES))
    pool = Pool(tokens=size, eviction=eviction, sinks=pool_sinks, recent=recent)
    rng = np.random.default_rng(draw(st.integers(0, 999), "seed"))
    lengths = np.array(draw(st.tuples(st.integers(1, 24), st.integers(1, 24)), "lengths"))
    prompt = after_prompt(pool, jnp.asarray(lengths, jnp.int32), K, size, device_sinks)
    positions, used = prompt, first_used(pool, prompt)
    there = contents(positions, used)
    plain = [[Reference(pool, size, window, sorted(head)) for head in row] for row in there]
    for i, j in np.ndindex(B, K):  # sinks and the last tokens, and all if there is room
        there = range(device_sinks, lengths[i])
        kept = [p for p in there if p < pool_sinks] + [p for p in there if p >= pool_sinks][::-1]
        assert set(plain[i][j].rows) == set(kept[:size])
    n, since = 5, 0
    for _ in range(5 * window):
        now = jnp.asarray(lengths, jnp.int32)  # of the step's tokens
        eligible = np.asarray(held_now(positions, now, window))
        slots, counts = np.zeros((B, K, n), np.int32), np.zeros((B, K), np.int32)
        for i, j in np.ndindex(B, K):
            there = np.flatnonzero(eligible[i, j] >= 0)
            expected = {p for p in plain[i][j].rows if p <= lengths[i] - window}
            assert set(eligible[i, j, there].tolist()) == expected
            counts[i, j] = rng.integers(0, min(n, len(there)) + 1)
            slots[i, j, : counts[i, j]] = rng.permutation(there)[: counts[i, j]]
            wanted = eligible[i, j, slots[i, j, : counts[i, j]]].tolist()
            plain[i][j].request(wanted, int(lengths[i]))
        if used is not None:
            used = touched(pool, used, Request(jnp.asarray(slots), jnp.asarray(counts)), now)
        lengths = lengths + 1
        since += 1
        if since < window and rng.random() < 0.8:  # sometimes earlier, as in a changing batch
            continue
        since = 0
        start = np.maximum(lengths - window, 0)
        new = start[:, None] + np.arange(window)
        before = np.asarray(positions)
        now = jnp.asarray(lengths, jnp.int32)
        made = inserted(pool, positions, used, jnp.asarray(new, jnp.int32), now, device_sinks)
        positions, used = made.positions, made.used
        after, into = contents(positions, used), np.asarray(made.slots)
        for i, j in np.ndindex(B, K):
            rows = [p for p in new[i].tolist() if p >= device_sinks and p < lengths[i]]
            fresh = [p for p in rows if p not in plain[i][j].rows]
            gone = plain[i][j].insert(fresh, int(lengths[i]))
            assert after[i][j] == plain[i][j].rows
            written = into[i, j][into[i, j] < size]
            assert len(set(written.tolist())) == len(written) == len(fresh) <= window
            overwritten = before[i, j, written]
            assert sorted(overwritten[overwritten >= 0].tolist()) == sorted(gone)
            np.testing.assert_array_equal(
                np.asarray(made.evicted)[i, j], (into[i, j] < size) & _at(before[i, j], into[i, j])
            )
            assert not set(gone) & set(range(pool_sinks)) and len(after[i][j]) <= size
        again = inserted(pool, positions, used, jnp.asarray(new, jnp.int32), now, device_sinks)
        assert (np.asarray(again.slots) == size).all() and not np.asarray(again.evicted).any()
        assert contents(again.positions, again.used) == after


def _at(rows: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Whether a slot had a row."""
    return rows[np.minimum(slots, len(rows) - 1)] >= 0


@functools.partial(jax.jit, static_argnums=(0, 1))
def read(
    pool: Pool,
    policy: Oracle,
    host: jax.Array,
    positions: jax.Array,
    used: jax.Array | None,
    hot: HotSet,
    scores: jax.Array,
    now: jax.Array,
) -> tuple[Request, jax.Array, jax.Array | None, HotSet]:
    """A step's request and the rows that it gets, `used` and the hot set afterwards."""
    there = held(positions, now, policy.window)
    size = policy.request_size(scores.shape[3])
    request = policy.best(scores, now, size, there, alpha=1.0)
    used = None if used is None else touch(pool, used, request, now)
    hot, made = replacement(hot, request, now)
    transfer = XlaTransfer()
    rows, hot_rows = transfer.fetch(host, jnp.int32(0), request, hot.rows, made, default_mesh())
    assert rows is not None and hot_rows is not None
    return request, rows, used, hot._replace(rows=hot_rows)


@pytest.mark.slow  # of an engine: engine/test_pooled.py
@pytest.mark.parametrize("eviction", POOL_EVICTIONS)
@given(st.data())
@settings(max_examples=3)
def test_an_evicted_row_is_never_read(eviction, data):
    """Nor through a hot set, which must not keep it.

    A row is its token's position, and NaN once the reference has evicted it, until another is
    written there. Rows that must not be read are the most wanted.
    """
    size, window, pool_sinks, device_sinks = 9, 3, 2, 1
    pool = Pool(tokens=size, eviction=eviction, sinks=pool_sinks)
    policy = Oracle(budget=0.5, sinks=device_sinks, window=window)
    lengths = np.array(data.draw(st.tuples(st.integers(1, 24), st.integers(1, 24)), "lengths"))
    rng = np.random.default_rng(data.draw(st.integers(0, 999), "seed"))
    early = data.draw(st.sampled_from([0.0, 0.2]), "flushes that come early")
    positions = after_prompt(pool, jnp.asarray(lengths, jnp.int32), K, size, device_sinks)
    used = first_used(pool, positions)
    rows = np.where(np.asarray(positions) >= 0, np.asarray(positions, np.float32), np.nan)
    plain = [
        [Reference(pool, size, window, sorted(head)) for head in row]
        for row in contents(positions, used)
    ]
    hot, since = HotSet.empty(B, K, 6, 1, size, jnp.float32), 0
    for _ in range(6 * window):
        now = jnp.asarray(lengths, jnp.int32)
        scores = rng.normal(size=(B, K, 1, size)).astype(np.float32)
        live = rows[:, :, None] <= (lengths - window)[:, None, None, None]
        scores = jnp.asarray(np.where(live, scores, 100.0), jnp.float32)
        host = jax.device_put(rows[None, ..., None], Placement(default_mesh()).host)
        request, got, used, hot = read(pool, policy, host, positions, used, hot, scores, now)
        for i, j in np.ndindex(B, K):
            seen = np.asarray(got)[i, j, : int(request.count[i, j]), 0].tolist()
            allowed = {p for p in plain[i][j].rows if p <= lengths[i] - window}
            assert len(set(seen)) == len(seen) and set(seen) <= allowed
            assert seen or len(allowed) < 2
            plain[i][j].request([int(p) for p in seen], int(lengths[i]))
        lengths, since = lengths + 1, since + 1
        if since < window and rng.random() >= early:
            continue
        since = 0
        new = np.maximum(lengths - window, 0)[:, None] + np.arange(window)
        given = jnp.asarray(new, jnp.int32), jnp.asarray(lengths, jnp.int32)
        made = inserted(pool, positions, used, *given, device_sinks)
        positions, used, hot = made.positions, made.used, forgotten(hot, made.slots)
        for i, j in np.ndindex(B, K):
            wanted = [p for p in new[i].tolist() if device_sinks <= p < lengths[i]]
            fresh = [p for p in wanted if p not in plain[i][j].rows]
            gone = plain[i][j].insert(fresh, int(lengths[i]))
            rows[i, j, np.isin(rows[i, j], gone)] = np.nan
            for p, slot in zip(new[i], np.asarray(made.slots)[i, j], strict=True):
                if slot < size:
                    rows[i, j, slot] = p


def one_head(eviction: str, size: int, fetches: list[list[int]], **settings) -> tuple[Any, Any]:
    """Directory after tokens 0 .. size - 1 and some requests; sinks 0, window 1."""
    pool = Pool(tokens=size, eviction=eviction, sinks=0, **settings)
    positions = after_prompt(pool, jnp.array([size], jnp.int32), 1, size, 0)
    used = first_used(pool, positions)
    for number, slots in enumerate(fetches):
        padded = jnp.asarray(np.resize(slots, (1, 1, 4)), jnp.int32)
        request = Request(padded, jnp.array([[len(slots)]], jnp.int32))
        if used is not None:
            used = touched(pool, used, request, jnp.array([size + number], jnp.int32))
    new, length = jnp.array([[size]], jnp.int32), jnp.array([size + 1], jnp.int32)
    return pool, inserted(pool, positions, used, new, length, 0)


@pytest.mark.parametrize("eviction, victim", [("fifo", 0), ("lru", 1), ("counter", 2)])
def test_the_three_orders_differ(eviction, victim):
    """Tokens 0 to 3, the newest safe; fetched {0, 1}, {0, 1}, {0, 2}."""
    _, made = one_head(eviction, 4, [[0, 1], [0, 1], [0, 2]], recent=0.5)
    assert made.slots.tolist() == [[[victim]]] and made.evicted.tolist() == [[[True]]]


def test_full_counters_are_halved_in_order():
    often = 2**COUNTER_BITS - 1
    fetches = [[0, 1, 2, 3]] + [[0, 1, 2]] * 99 + [[0, 1]] * 100 + [[0]] * (often - 200)
    _, made = one_head("counter", 5, fetches[:-1], recent=0.0)
    assert made.used[0, 0, :4].tolist() == [often - 1, 200, 100, 1]
    _, made = one_head("counter", 5, fetches, recent=0.0)
    assert made.used[0, 0, :4].tolist() == [often // 2, 100, 50, 0]
    assert made.slots.tolist() == [[[3]]]  # 3 and 4 are at 0 now, 3 is older


def test_limits():
    assert Pool(tokens=100).slots(1000, 4, 32) == 100
    assert Pool(tokens=2000).slots(1000, 4, 32) == 1000
    assert Pool(share=0.8).slots(1023, 4, 32) == 818 and Pool(share=1.0).slots(9, 4, 32) == 9
    assert Pool(tokens=32).slots(1000, 4, 32) == 32
    for pool, sinks in ((Pool(tokens=31), 4), (Pool(tokens=35), 0), (Pool(share=0.03), 4)):
        with pytest.raises(InputError, match=r"pool\.tokens .* use at least 3[26]"):
            pool.slots(1000, sinks, 32)
    assert Pool.of_limit(0.8) == Pool(share=0.8) and Pool.of_limit(12) == Pool(tokens=12)


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"tokens": 0}, "pool.tokens 0"),
        ({"share": 1.5}, "pool.share 1.5"),
        ({"share": float("nan")}, "pool.share nan"),
        ({"tokens": 9, "eviction": "random"}, "pool.eviction random: use fifo, lru or counter"),
        ({"tokens": 9, "sinks": -1}, "pool.sinks -1"),
        ({"tokens": 9, "recent": 1.0}, "recent"),
        ({"tokens": 9, "share": 0.5}, "either"),
        ({}, "either"),
    ],
)
def test_limits_out_of_range(wrong, named):
    with pytest.raises(InputError, match=named):
        Pool(**wrong)
