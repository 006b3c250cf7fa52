"""The policies that InfiniGen is compared with, against plain NumPy and against the full cache."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runtime import NEW, RAGGED, engine, full_scores, random_model, scores_of
from scipy.special import softmax
from tiny import normal, refuses

from infinigen_jax import Engine, Full, InputError, Pool
from infinigen_jax.cache.layers import Slots
from infinigen_jax.decode.steps import flush_cache
from infinigen_jax.models import ModelConfig
from infinigen_jax.models.llama import Layer
from infinigen_jax.ops.span import Span
from infinigen_jax.policies import H2O, POLICIES, Oracle, Policy, PreviousQuery, Quest, Window
from infinigen_jax.policies.base import Attended, Budgeted, Lookup
from infinigen_jax.selection.select import Request

KINDS = [Window, H2O, Quest, PreviousQuery, Oracle]
B, K, G, D, T = 2, 2, 2, 8, 128
SINKS, RECENT = 2, 4
POSITIONS = np.array([60, 37])
CONFIG = random_model("gqa").config


class FixedQuery(Layer):
    """Layer with a given query; it has no parameters, so nothing else can be computed."""

    def __init__(self, query: jax.Array):
        self.given = nnx.Param(query.reshape(B, K * G, D))

    def query(self, a, positions, lengths=None):
        return self.given[...]


def settings(**more):
    return {"budget": 0.2, "sinks": SINKS, "window": RECENT} | more


@functools.partial(jax.jit, static_argnums=0)
def select(policy: Any, state: Any, query: jax.Array, at: jax.Array) -> Request:
    layer, size = FixedQuery(query), policy.request_size(T)
    return policy.select(Lookup(CONFIG, layer, {}, state, jnp.zeros((B, 4)), at, size, T))


def requested(policy, state, query=None, at=POSITIONS) -> Request:
    query = normal(B, K, G, D) if query is None else query
    return select(policy, state, jnp.asarray(query), jnp.asarray(at, jnp.int32))


def chosen(policy, state, query=None, at=POSITIONS) -> list[list[set[int]]]:
    """Return the slots that a policy selects, by sequence and KV head."""
    request = requested(policy, state, query, at)
    slots, count = np.asarray(request.slots), np.asarray(request.count)
    return [[set(slots[i, j, : count[i, j]].tolist()) for j in range(K)] for i in range(B)]


def filled(policy, keys: np.ndarray):
    span = Span.whole(B, keys.shape[2])
    return jax.jit(policy.append)({}, policy.init(CONFIG, B, T), jnp.asarray(keys), span)


def eligible(i: int, at: np.ndarray = POSITIONS) -> np.ndarray:
    return np.arange(SINKS, at[i] - RECENT + 1)


def budget(i: int, at: np.ndarray = POSITIONS) -> int:
    return int(0.2 * at[i])


def best(rank: np.ndarray, i: int) -> set[int]:
    """Return the budget's eligible slots of largest rank."""
    order = sorted(eligible(i), key=lambda slot: (-rank[slot], slot))
    return set(order[: budget(i)])


def test_window_takes_the_most_recent():
    policy = Window(**settings())
    got = chosen(policy, policy.init(CONFIG, B, T))
    for i in range(B):
        newest = POSITIONS[i] - RECENT
        assert got[i] == [set(range(newest - budget(i) + 1, newest + 1))] * K


def test_window_takes_the_most_recent_of_a_pool():
    """Its rows are in no order, and some are not only on the host."""
    policy, rng, size = Window(**settings()), np.random.default_rng(0), 20
    held = np.array([[rng.permutation(eligible(i))[:size] for _ in range(K)] for i in range(B)])
    held[:, :, ::3] = -1
    given: Any = CONFIG, FixedQuery(jnp.zeros((B, K, G, D))), {}, policy.init(CONFIG, B, size)
    given += (jnp.zeros((B, 4)), jnp.asarray(POSITIONS), policy.request_size(size), size)
    request = jax.jit(lambda held: policy.select(Lookup(*given, held=held)))(jnp.asarray(held))
    for i, j in np.ndindex(B, K):
        slots = np.asarray(request.slots)[i, j, : int(request.count[i, j])]
        assert sorted(held[i, j, slots]) == sorted(held[i, j])[-(size // 5) :]


def test_oracle_takes_the_largest_weights_of_the_group():
    keys, query = normal(B, K, T, D, seed=1), normal(B, K, G, D, seed=2)
    policy = Oracle(**settings())
    state = filled(policy, keys)
    got = chosen(policy, state, query)
    scores = np.einsum("bkgd,bktd->bkgt", query, keys)
    for i, j in np.ndindex(B, K):
        weights = np.zeros(T)
        weights[eligible(i)] = softmax(scores[i, j][:, eligible(i)], axis=-1).sum(axis=0)
        assert got[i][j] == best(weights, i)


def test_the_previous_query_selects_for_the_next_token():
    keys, query = normal(B, K, T, D, seed=1), normal(B, K, G, D, seed=2)
    policy, oracle = PreviousQuery(**settings()), Oracle(**settings())
    state = filled(policy, keys)
    exact = filled(oracle, keys)
    nothing = jnp.zeros((B, K, 1))
    places: Any = nothing.astype(jnp.int32), nothing, jnp.zeros((B, 1), jnp.int32), nothing
    state = policy.observe(state, Attended(jnp.asarray(query), *places))
    assert chosen(policy, state, normal(B, K, G, D, seed=9)) == chosen(oracle, exact, query)
    prompt = normal(B, 50, K * G, D, seed=3)
    lengths = np.array([50, 20])
    span = Span(jnp.zeros(len(lengths), jnp.int32), jnp.asarray(lengths, jnp.int32))
    state = policy.observe_queries(state, jnp.asarray(prompt), jnp.zeros((B, K, T)), span)
    last = np.stack([prompt[i, n - 1] for i, n in enumerate(lengths)]).reshape(B, K, G, D)
    assert chosen(policy, state) == chosen(oracle, exact, last)


def test_quest_takes_whole_pages_by_their_bounds():
    keys, query = normal(B, K, T, D, seed=1), normal(B, K, G, D, seed=2)
    page = 4
    policy = Quest(**settings(page=page))
    state, append = filled(policy, keys[:, :, :40]), jax.jit(policy.append)
    for start in range(40, T, 8):  # and the rest as flushes bring it
        span = Span(jnp.full((B,), start, jnp.int32), jnp.full((B,), 8, jnp.int32))
        state = append({}, state, jnp.asarray(keys[:, :, start : start + 8]), span)
    pages = keys.reshape(B, K, T // page, page, D)
    least, most = pages.min(axis=3), pages.max(axis=3)
    products = [np.einsum("bkgd,bkpd->bkgpd", query, x) for x in (least, most)]
    bound = np.maximum(*products).sum(axis=-1)
    exact = np.einsum("bkgd,bktd->bkgt", query, keys).reshape(B, K, G, T // page, page)
    assert (bound[..., None] >= exact - 1e-5).all()
    got = chosen(policy, state, query)
    for i, j in np.ndindex(B, K):
        rank = np.repeat(softmax(bound[i, j], axis=-1).sum(axis=0), page)
        assert got[i][j] == best(rank, i)


def test_h2o_evicts_for_good():
    """Steps against a list of the rows that each head still has."""
    policy = H2O(**settings())
    observe = jax.jit(policy.observe)
    rng = np.random.default_rng(0)
    mass = rng.random((B, K, T)).astype(np.float32)
    state, gone = jnp.asarray(mass), [[set() for _ in range(K)] for _ in range(B)]

    def best_left(i: int, j: int, at: np.ndarray) -> list[int]:
        left = [slot for slot in eligible(i, at) if slot not in gone[i][j]]
        return sorted(left, key=lambda slot: (-mass[i, j][slot], slot))

    for at in (POSITIONS + step for step in range(4)):
        got, request = chosen(policy, state, at=at), requested(policy, state, at=at)
        for i, j in np.ndindex(B, K):
            assert got[i][j] == set(best_left(i, j, at)[: budget(i, at)])
        weights = rng.random(request.slots.shape).astype(np.float32)
        weights = np.where(np.asarray(request.valid), weights, 0)
        resident = np.asarray(Slots(SINKS, RECENT).positions(jnp.asarray(at, jnp.int32)))
        recent = rng.random((B, K, resident.shape[1])).astype(np.float32)
        for i, j in np.ndindex(B, K):
            np.add.at(mass[i, j], np.asarray(request.slots)[i, j], weights[i, j])
            np.add.at(mass[i, j], resident[i], recent[i, j])
        given: Any = request.slots, *map(jnp.asarray, (weights, resident, recent))
        state = observe(state, Attended(jnp.zeros((B, K, G, D)), *given))
        for i, j in np.ndindex(B, K):
            gone[i][j] |= set(best_left(i, j, at)[budget(i, at) :])
    assert all(len(slots) > 3 for row in gone for slots in row)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=() if k is Quest else pytest.mark.slow) for k in KINDS],
    ids=lambda kind: kind.name,
)
def test_everything_fetched_is_the_full_cache(kind):
    model, policy = random_model("one"), kind(budget=1.0, window=4, sinks=2)
    np.testing.assert_allclose(scores_of(model, policy), full_scores(model), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_int4_rows_act_as_exact_rows_of_the_same_numbers(name):
    """Before each step of a greedy generation, the other host cache gets the decoded rows."""
    kind: Any = POLICIES[name]
    fields = {field.name for field in dataclasses.fields(kind)}
    # Stream no layer; with alpha 1 the mean count is often below the budget.
    more = {"streamed_layers": 0, "alpha": 1.0} if name == "infinigen-paper" else {}
    policy = kind(**{n: x for n, x in settings(**more).items() if n in fields})
    mine, other = (
        engine("one", policy, 0, rows=r).start(RAGGED, max_new_tokens=NEW) for r in ("int4", "auto")
    )
    cache, twin, tokens = mine.cache, other.cache, mine.drawn
    for step in range(RECENT + 2):  # rows of the prompt alone at first, then flushed ones
        both = (mine, cache), (other, twin)
        cache, twin = (flush_cache(run.decoder, run.runtime.weights, x) for run, x in both)
        stored = jax.device_put(cache.host, jax.memory.Space.Device)
        pairs = zip(cache.scales, stored, strict=True)
        rows = jnp.stack([mine.decoder.row_format.decode(*pair) for pair in pairs])
        assert step or np.abs(np.asarray(twin.host) - np.asarray(rows))[:, 0, :, :37].max() > 0.1
        twin = twin._replace(host=jax.device_put(rows, twin.host.sharding))
        both = (mine, cache), (other, twin)
        got, expected = (run.dispatcher.step(x, tokens) for run, x in both)
        mine_log, other_log = (jax.nn.log_softmax(each.logits) for each in (got, expected))
        np.testing.assert_allclose(mine_log, other_log, atol=1e-4)
        np.testing.assert_array_equal(got.counts.selected, expected.counts.selected)
        np.testing.assert_array_equal(got.best, expected.best)
        cache, twin, tokens = got.cache, expected.cache, got.best


def test_all_follow_the_protocol():
    for name, kind in POLICIES.items():
        policy = kind()
        assert isinstance(policy, Policy) and policy.name == name
        assert not (policy.observes and not policy.lead)
        if kind is not Full:
            made: Any = kind
            refuses("budget", made, budget=0.0)


class NoField(Budgeted):
    name: ClassVar[str] = "mine"

    def __init__(self, sign: int):
        super().__init__()
        object.__setattr__(self, "sign", sign)  # no field: equal programs for all signs

    def select(self, lookup: Lookup) -> Request:
        return self.choose(lookup.slot_positions.astype(jnp.float32)[:, :, None], lookup)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Budgeted):
    """Newest rows on the first host layer, none on the others."""

    name: ClassVar[str] = "mine"

    window: int = 4
    more: Any = 0
    narrow: bool = False

    def select(self, lookup: Lookup) -> Request:
        request = self.choose(lookup.slot_positions.astype(jnp.float32)[:, :, None], lookup)
        slots = request.slots[:, :, :1] if self.narrow else request.slots
        return Request(slots, jnp.where(lookup.number == 0, request.count, 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watching(Mine):
    """Policy with a state, wrong in the ways that its fields say."""

    name: ClassVar[str] = "watching"
    observes: ClassVar[bool] = True

    axes: int = 3
    forgets: bool = False

    def __post_init__(self):
        """Omit the checks of the base."""

    def init(self, config: ModelConfig, batch: int, capacity: int) -> Any:
        return jnp.zeros((batch, config.num_kv_heads, capacity)[: self.axes])

    def observe(self, state: Any, attended: Attended) -> Any:
        return None if self.forgets else state


class Pooled(Watching):
    pools: ClassVar[bool] = True

    def observe_queries(self, state: Any, queries: Any, mass: Any, span: Span) -> Any:
        assert mass is None  # attention is by position
        return state + 1


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (NoField(1), "its `sign` is no field; make NoField a frozen dataclass"),
        (Mine(more=[1]), "unhashable type.* arrays come from `prepare`"),
        (Mine(narrow=True), r"returned slots \[1, 2, 1\] .*give \[1, 2, 12\]"),
        (Watching(axes=1), r"`init` returned an array of shape \(1,\); give \[1, 2, ...\]"),
        (Watching(forgets=True), "`observe` returned a state of other arrays than `init`"),
        (Watching(window=0), "window 0: "),
    ],
)
def test_policies_that_cannot_be_are_refused(policy, problem):
    with pytest.raises(InputError, match=problem):
        Engine(random_model("one"), policy=policy, dense_layers=0).generate([5] * 60, None, 4)


def test_slots_of_a_pool_get_no_attention():
    made = Engine(random_model("one"), policy=Pooled(), dense_layers=0, pool=Pool(tokens=20))
    run = made.start([5] * 60, None, 4)
    assert float(run.cache.states[0].min()) == 1


@pytest.mark.slow
def test_a_selection_knows_its_layer():
    model = random_model("gqa")
    run = Engine(model, policy=Mine(budget=0.1), dense_layers=0).start([5] * 60, None, 4)
    _, selected = run.watch(lambda decoder, seen: (seen.after, seen.after.counts.selected), [7])
    assert [int(counts[0]) > 0 for counts in selected] == [True] * model.config.num_layers
    assert int(selected[-1][0]) == int(selected[0][0]) == 6 * model.config.num_kv_heads
