"""From scores to slots: the counting rule, the ranking of a group, and the exact top-k."""

import re
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import refuses

from infinigen_jax.ops.compaction import unpack_marks
from infinigen_jax.policies import InfiniGen
from infinigen_jax.selection.select import (
    budget_fraction,
    budget_rows,
    group_margin,
    group_rank,
    select,
    top_choice,
)

INF = float("inf")

# Compiled, as the engine runs them; hence few different shapes below.
compiled_select = jax.jit(select, static_argnames=("alpha", "size", "mode"))
compiled_rank = jax.jit(group_rank)
compiled_top = jax.jit(
    lambda rank, count, size: top_choice(rank, count, size)[0], static_argnames="size"
)


def test_a_group_ranks_by_the_sum_of_its_softmaxes():
    # Head 0 is sure of token 0; head 1 wavers between 1 and 2; token 3 is second for both.
    ranked, margin = compiled_rank, jax.jit(group_margin)
    scores = np.array([[[[5.0, 0.0, 0.0, 4.0], [0.0, 1.0, 1.1, 0.9]]]], np.float32)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    rank = ranked(scores)
    np.testing.assert_allclose(np.exp(rank), weights.sum(2), rtol=1e-5)
    masked = jnp.where(jnp.arange(4)[None, None, None] < 2, jnp.asarray(scores), -jnp.inf)
    assert np.isneginf(ranked(masked)[0, 0, 2:]).all()
    nothing = np.full((1, 1, 2, 4), -np.inf, np.float32)
    assert np.isneginf(ranked(nothing)).all() and np.isneginf(margin(nothing)).all()
    single = scores[:, :, :1]
    np.testing.assert_array_equal(ranked(single), single[:, :, 0])


SINGLE, GROUP = (2, 2, 1, 33), (2, 1, 3, 33)
# Shape, alpha and mode: with and without a bound on the ranks. Which tokens are eligible is told
# for all heads, for each, or by scores of -inf.
CHOICES = [(SINGLE, 0.0, "head", None), (SINGLE, INF, "head", 2), (SINGLE, 4.0, "mean", None)]
CHOICES += [(GROUP, 4.0, "head", 1), (GROUP, 0.0, "mean", 2)]


@pytest.mark.parametrize("shape, alpha, mode, heads", CHOICES)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1))
def test_select_against_plain_python(shape, alpha, mode, heads, seed):
    """All that any head of a group would take, the best by the group's rank, in a batch."""
    rng, (b, k, _, t) = np.random.default_rng(seed), shape
    scores = rng.normal(scale=rng.choice([0.1, 3.0, 10.0]), size=shape).astype(np.float32)
    scores = np.round(scores) if rng.random() < 0.5 else scores
    shares, caps = rng.choice([0.0, 0.1, 0.5, 1.0], (b, 1, 1)), rng.choice([0, 1, 3, 33, 33], b)
    eligible = rng.random((b, k if heads == 2 else 1, t)) < shares
    mask = None if heads is None else eligible
    eligible = np.broadcast_to(eligible, (b, k, t))
    masked = np.where(eligible[:, :, None], scores, -np.inf)
    rank = np.array(compiled_rank(masked))
    passing = np.zeros((b, k, t), bool)
    for i, j in np.ndindex(b, k):
        candidates = scores[i, j][:, eligible[i, j]]
        if candidates.size:
            distance = candidates - candidates.max(1, keepdims=True)
            passing[i, j, eligible[i, j]] = distance.max(0) > -alpha
    counts = passing.sum(2)
    if mode == "mean":
        active = eligible.any(axis=(1, 2))  # sequences with rows to choose from
        counts[:] = counts.sum() // max(1, k * active.sum())
    else:
        rank[~passing] = -np.inf
    counts = np.minimum(counts, np.minimum(caps[:, None], eligible.sum(2)))
    cap = jnp.asarray(caps, jnp.int32)
    given = masked if mask is None else scores
    request = compiled_select(given, mask, alpha=alpha, cap=cap, size=t, mode=mode)
    np.testing.assert_array_equal(unpack_marks(request.marks, t), request.chosen)
    assert not np.asarray(request.slots)[~np.asarray(request.valid)].any()
    np.testing.assert_array_equal(request.count, counts)
    for i, j in np.ndindex(b, k):
        slots = np.asarray(request.slots)[i, j, : counts[i, j]].tolist()
        assert slots == numpy_top(rank[i, j], counts[i, j])
        assert slots == np.flatnonzero(request.chosen[i, j]).tolist()


def numpy_top(rank: np.ndarray, count: int) -> list[int]:
    """Return ascending slots of the largest ranks, equal ones in order of slot."""
    return sorted(np.argsort(-rank, kind="stable")[:count].tolist())


def check_top(rank: np.ndarray, count: np.ndarray, size: int) -> None:
    got = np.asarray(compiled_top(jnp.asarray(rank), jnp.asarray(count, jnp.int32), size=size))
    for place in np.ndindex(*count.shape):
        n = int(count[place])
        assert got[place][:n].tolist() == numpy_top(rank[place], n)
        assert not got[place][n:].any()


# Values that have collided with the search over bit patterns in other implementations.
AWKWARD = [0.0, -0.0, 1.0, -1.0, INF, -INF, 3.4e38, -3.4e38, 1.2e-38, -1.2e-38, 0.5]


@given(st.sampled_from([1, 12, 70]), st.integers(0, 2**32 - 1))
@example(12, 7)  # all found by comparing, the best of them 0
def test_top_slots_of_equal_and_awkward_values(t, seed):
    """With values that are far apart or close together, in any mixture."""
    rng = np.random.default_rng(seed)
    close, few = 1 + 1e-7 * rng.integers(0, 9, t), -rng.integers(0, 4, t).astype(np.float32)
    kinds = [rng.choice(AWKWARD, t), rng.normal(size=t), close, few]
    rank = np.choose(rng.choice(4, (1, 2, t), p=rng.dirichlet(np.ones(4))), kinds)
    count = rng.choice([0, t, rng.integers(0, t + 1)], (1, 2))
    check_top(rank.astype(np.float32), count, t)


def test_top_slots_of_large_arrays():
    """More than 16 bits can count."""
    rng = np.random.default_rng(3)
    rank = rng.normal(size=(2, 3, 131_072)).astype(np.float32)
    rank[0, 1, ::2] = -INF  # as of tokens that are not eligible
    rank[1, 2] = 0.25  # all equal
    check_top(rank, np.array([[17, 40_000, 0], [131_072, 1, 1234]]), 131_072)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 2**31 - 1))
def test_budget_rows_is_the_exact_floor(numerator, denominator, tokens):
    numerator = min(numerator, denominator)
    budget = numerator / denominator
    assert int(budget_rows(budget, jnp.int32(tokens))) == tokens * numerator // denominator


def test_budget_rows_where_floats_round_down():
    assert int(0.29 * 100) == 28
    assert int(budget_rows(0.29, jnp.int32(100))) == 29
    assert budget_rows(1.0, jnp.array([0, 7], jnp.int32)).tolist() == [0, 7]
    assert budget_fraction(0.1) * 10 == 1
    # 32 rows of 65,536 tokens, which no thousandth is near.
    assert int(budget_rows(32 / 65536, jnp.int32(65536))) == 32
    assert all(budget_fraction(1 / n) == Fraction(1, n) for n in range(1001, 20000, 7))
    assert int(budget_rows(63 / 131072, jnp.int32(131072))) == 62
    for budget in (1e-10, 5e-324, 0.0):  # the smallest are int32
        share = budget_fraction(budget)
        assert share.numerator == 1 and 0 < share.denominator < 2**31


@pytest.mark.parametrize("budget", [0.1, 0.2, 0.3, 0.007, 1 / 3, 0.999, 1.0, 0.0005])
def test_requests_hold_the_largest_cap(budget):
    policy = InfiniGen(budget=budget)
    for capacity in (128, 256, 1024, 5120):
        assert policy.request_size(capacity) >= int(budget_rows(budget, jnp.int32(capacity)))
        assert 1 <= policy.request_size(capacity) <= capacity


NAN = float("nan")
WRONG: dict[str, list[Any]] = {"budget": [0.0, -0.1, 1.01, NAN, 1e-10], "alpha": [-1.0, NAN]}
WRONG |= {"partial_ratio": [0.0, 1.5, NAN], "window": [0, True], "sinks": [-1]}
WRONG |= {"index_dtype": ["int3"], "count": ["median"], "tail": ["false"]}


@pytest.mark.parametrize("name, value", [(n, x) for n, values in WRONG.items() for x in values])
def test_settings_out_of_range_are_named(name, value):
    refuses(f"{name} ", InfiniGen, **{name: value})


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere nothing is searched")
def test_marks_that_are_not_searched_are_not_copied():
    rank = jnp.zeros((1, 2, 4096))
    choose = jax.jit(lambda rank, count: top_choice(rank, count, 64, rank > 1)[1:])
    text = choose.lower(rank, jnp.array([[3, 64]])).compile().as_text()
    main = text[text.index("\nENTRY") :]
    assert "while(" in main and not re.search(r"= (pred|u32)\S+ (copy|conditional)\(", main)
