"""The directories of the host pool and of the hot set against plain ones in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import refuses

from infinigen_jax.cache.hot_set import HotSet, Replacement, forget, replacement
from infinigen_jax.cache.pool import COUNTER_BITS, first_used, held, insert, of_prompt, touch
from infinigen_jax.selection.select import Request
from infinigen_jax.settings.pool import Pool

B, K = 2, 2
inserted = jax.jit(insert, static_argnums=(0, 5))
touched = jax.jit(touch, static_argnums=0)
after_prompt = jax.jit(of_prompt, static_argnums=(0, 2, 3, 4))
held_now = jax.jit(held, static_argnums=2)
forgotten = jax.jit(forget)
replaced = jax.jit(replacement)


class Reference:
    """Pool of one KV head: a dictionary from position to the value that orders eviction."""

    def __init__(self, pool: Pool, size: int, window: int, kept: list[int]):
        self.pool, self.size, self.window = pool, size, window
        self.rows = {p: p if pool.eviction == "lru" else 0 for p in kept}

    def request(self, wanted: list[int], now: int) -> None:
        if self.pool.eviction == "lru":
            self.rows |= {p: now for p in wanted}
        if self.pool.eviction == "counter":
            self.rows |= {p: self.rows[p] + 1 for p in wanted}

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
    where = np.asarray(positions)
    by = np.zeros_like(where) if used is None else np.asarray(used)
    found: list[list[dict[int, int]]] = [[{} for _ in range(K)] for _ in range(B)]
    for i, j, slot in np.argwhere(where >= 0):
        assert where[i, j, slot] not in found[i][j]
        found[i][j][int(where[i, j, slot])] = int(by[i, j, slot])
    return found


def fetched(host: np.ndarray, hot: HotSet, request: Request, made: Replacement) -> HotSet:
    """The hot set with the missing rows; every requested row is then in its entry."""
    rows, slots, entry = np.array(hot.rows), np.asarray(request.slots), np.asarray(made.entry)
    for i, j, n in np.argwhere(np.asarray(made.miss)):
        rows[i, j, entry[i, j, n]] = host[i, j, slots[i, j, n]]
    return hot._replace(rows=jnp.asarray(rows))


@pytest.mark.parametrize(
    "eviction, size, window, sinks, device_sinks, recent",
    [("fifo", 9, 3, 2, 0, 0.5), ("lru", 9, 3, 2, 2, 0.5), ("counter", 9, 4, 0, 1, 0.0)],
)
@given(st.data())
@settings(max_examples=6)
def test_against_dictionaries(eviction, size, window, sinks, device_sinks, recent, data):
    """Prompts of two lengths, then requests and flushes, in the engine's order, with a hot set.

    A row is its token's position, and NaN once the reference has evicted it, until another is
    written there.
    """
    pool = Pool(tokens=size, eviction=eviction, sinks=sinks, recent=recent)
    rng = np.random.default_rng(data.draw(st.integers(0, 999), "seed"))
    lengths = np.array(data.draw(st.tuples(st.integers(1, 24), st.integers(1, 24)), "lengths"))
    positions = after_prompt(pool, jnp.asarray(lengths, jnp.int32), K, size, device_sinks)
    used = first_used(pool, positions)
    plain = [
        [Reference(pool, size, window, sorted(head)) for head in row]
        for row in contents(positions, used)
    ]
    for i, j in np.ndindex(B, K):  # sinks and the last tokens, and all if there is room
        there = range(device_sinks, lengths[i])
        kept = [p for p in there if p < sinks] + [p for p in there if p >= sinks][::-1]
        assert set(plain[i][j].rows) == set(kept[:size])
    rows = np.where(np.asarray(positions) >= 0, np.asarray(positions, np.float32), np.nan)
    hot, since = HotSet.empty(B, K, 6, 1, size, jnp.float32), 0
    for _ in range(5 * window):
        now = jnp.asarray(lengths, jnp.int32)  # of the step's tokens
        there = np.asarray(held_now(positions, now, window))
        slots, counts = np.zeros((B, K, 5), np.int32), np.zeros((B, K), np.int32)
        for i, j in np.ndindex(B, K):
            eligible = np.flatnonzero(there[i, j] >= 0)
            allowed = {p for p in plain[i][j].rows if p <= lengths[i] - window}
            assert set(there[i, j, eligible].tolist()) == allowed
            count = counts[i, j] = rng.integers(0, min(5, len(eligible)) + 1)
            slots[i, j, :count] = rng.permutation(eligible)[:count]
        request = Request(jnp.asarray(slots), jnp.asarray(counts))
        used = None if used is None else touched(pool, used, request, now)
        hot, made = replaced(hot, request, now)
        hot = fetched(rows[..., None], hot, request, made)
        for i, j in np.ndindex(B, K):
            wanted = there[i, j, slots[i, j, : counts[i, j]]].tolist()
            got = np.asarray(hot.rows)[i, j, np.asarray(made.entry)[i, j, : counts[i, j]], 0]
            assert got.tolist() == wanted
            plain[i][j].request(wanted, int(lengths[i]))
        lengths, since = lengths + 1, since + 1
        if since < window and rng.random() < 0.8:  # sometimes earlier, as in a changing batch
            continue
        since = 0
        new = np.maximum(lengths - window, 0)[:, None] + np.arange(window)
        flushed = jnp.asarray(new, jnp.int32), jnp.asarray(lengths, jnp.int32), device_sinks
        before, made = np.asarray(positions), inserted(pool, positions, used, *flushed)
        positions, used, hot = made.positions, made.used, forgotten(hot, made.slots)
        after, into = contents(positions, used), np.asarray(made.slots)
        for i, j in np.ndindex(B, K):
            wanted = [p for p in new[i].tolist() if device_sinks <= p < lengths[i]]
            fresh = [p for p in wanted if p not in plain[i][j].rows]
            gone = plain[i][j].insert(fresh, int(lengths[i]))
            assert after[i][j] == plain[i][j].rows and len(after[i][j]) <= size
            written = into[i, j][into[i, j] < size]
            assert len(set(written.tolist())) == len(written) == len(fresh) <= window
            overwritten, evicted = before[i, j, written], np.asarray(made.evicted)[i, j]
            assert sorted(overwritten[overwritten >= 0].tolist()) == sorted(gone)
            np.testing.assert_array_equal(evicted[into[i, j] < size], overwritten >= 0)
            assert not evicted[into[i, j] == size].any()
            assert not set(gone) & set(range(sinks))
            rows[i, j, np.isin(rows[i, j], gone)] = np.nan
            rows[i, j, written] = fresh
        again = inserted(pool, positions, used, *flushed)
        assert (np.asarray(again.slots) == size).all() and not np.asarray(again.evicted).any()
        assert contents(again.positions, again.used) == after


def test_full_counters_are_halved_in_order():
    """Tokens 0 to 4; the first ones are requested more often."""
    pool, often = Pool(tokens=5, eviction="counter", sinks=0, recent=0.0), 2**COUNTER_BITS - 1
    positions = after_prompt(pool, jnp.array([5], jnp.int32), 1, 5, 0)
    used = first_used(pool, positions)
    used = used.at[0, 0, :4].set(jnp.array([often - 2, 200, 100, 1], used.dtype))
    request, seen = Request(jnp.arange(4)[None, None], jnp.array([[1]])), []
    for position in 5, 6:
        used = touched(pool, used, request, jnp.array([position]))
        seen.append(used[0, 0, :4].tolist())
    assert seen == [[often - 1, 200, 100, 1], [often // 2, 100, 50, 0]]
    made = inserted(pool, positions, used, jnp.array([[5]]), jnp.array([6]), 0)
    assert made.slots.tolist() == [[[3]]]  # 3 and 4 are at 0 now, 3 is older


def test_limits():
    assert Pool(tokens=100).slots(1000, 4, 32) == 100
    assert Pool(tokens=2000).slots(1000, 4, 32) == 1000
    assert Pool(share=0.8).slots(1023, 4, 32) == 818 and Pool(share=1.0).slots(9, 4, 32) == 9
    assert Pool(tokens=32).slots(1000, 4, 32) == 32
    for tokens, share, sinks, slots in ((1000, 0.03, 0, 36), (30, 0.8, 4, 30), (39, 0.8, 4, 32)):
        assert Pool(share=share).slots(tokens, sinks, 32) == slots  # as many as the window needs
    for pool, sinks in ((Pool(tokens=31), 4), (Pool(tokens=35), 0)):
        refuses(r"pool\.tokens .* use at least 3[26]", pool.slots, 1000, sinks, 32)


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"tokens": 0}, "pool.tokens 0"),
        ({"share": 1.5}, "pool.share 1.5"),
        ({"tokens": 9, "eviction": "random"}, "pool.eviction random: use fifo, lru or counter"),
        ({"tokens": 9, "sinks": -1}, "pool.sinks -1"),
        ({"tokens": 9, "sinks": 3 * 10**9}, "pool.sinks .* at most"),
        ({"tokens": 9, "recent": 1.0}, "recent"),
        ({"tokens": 9, "share": 0.5}, "either"),
        ({}, "either"),
    ],
)
def test_limits_out_of_range(wrong, named):
    refuses(named, Pool, **wrong)


@given(st.data())
def test_requests_find_what_was_fetched_before(data):
    """Rows that the directory has are hits, and the least recently used ones are evicted."""
    b, k = 2, 2
    t, n, h = data.draw(st.sampled_from([(40, 7, 9), (33, 1, 1), (20, 20, 20)]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99), "seed"))
    hot = HotSet.empty(b, k, h, 4, t, jnp.float32)
    last = np.full((b, k, t), -1)  # position that last requested each slot
    for position in range(5):
        slots = np.stack([rng.permutation(t)[:n] for _ in range(b * k)]).reshape(b, k, n)
        counts = rng.integers(0, n + 1, (b, k))
        request = Request(jnp.asarray(slots, jnp.int32), jnp.asarray(counts, jnp.int32))
        before = np.asarray(hot.place)
        hot, made = replaced(hot, request, jnp.full((b,), position, jnp.int32))
        entry, miss = np.asarray(made.entry), np.asarray(made.miss)
        after = np.asarray(hot.place, np.int64)
        for head in np.ndindex(b, k):
            count = counts[head]
            wanted = slots[head][:count]
            np.testing.assert_array_equal(miss[head][:count], before[head][wanted] < 0)
            assert not miss[head][count:].any()
            np.testing.assert_array_equal(after[head][wanted], entry[head][:count])
            assert len(set(entry[head][:count])) == count
            hits = ~miss[head][:count]
            np.testing.assert_array_equal(before[head][wanted][hits], entry[head][:count][hits])
            kept = np.flatnonzero(after[head] >= 0)
            assert len(kept) == min(h, (before[head] >= 0).sum() + miss[head].sum())
            # `slots` is the inverse of `place`.
            np.testing.assert_array_equal(np.asarray(hot.slots)[head][after[head][kept]], kept)
            assert (np.asarray(hot.slots)[head] >= 0).sum() == len(kept)
            last[head][wanted] = position
            evicted = (before[head] >= 0) & (after[head] < 0)
            assert not evicted.any() or last[head][evicted].max() <= last[head][kept].min()


def test_sizes():
    """Entries have the narrowest dtype; a request may not be larger than the hot set."""
    for size, dtype in ((2**15, jnp.int16), (2**15 + 1, jnp.int32)):
        assert HotSet.empty(1, 1, size, 1, 1, jnp.float32).place.dtype == dtype
    request = Request(jnp.zeros((1, 1, 3), jnp.int32), jnp.zeros((1, 1), jnp.int32))
    hot = HotSet.empty(1, 1, 2, 4, 8, jnp.float32)
    with pytest.raises(ValueError, match="hot set of 2"):
        replacement(hot, request, jnp.zeros(1, jnp.int32))
