"""A budget shared out among layers: the best shares, and an engine that fetches by them."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime import RAGGED, SPARSE, counts_of, finished, random_model
from tiny import refuses

from infinigen_jax.engine.engine import Engine
from infinigen_jax.policies import InfiniGen, InfiniGenPaper, Quest
from infinigen_jax.selection.select import budget_rows
from infinigen_jax.speculation.layer_budgets import STEP, Curves, share_out

SHARES = (0.05, 0.1, 0.2, 0.4)
STEEP = dataclasses.replace(SPARSE, alpha=float("inf"), budget=0.25, layer_budgets="calibrated")


def loss_of(curves: Curves, layer: int, share: float) -> float:
    """Return the squared error of a layer, linear between measured shares."""
    squares = np.square([*curves.errors[layer], 0.0])
    return float(np.interp(share, [*curves.shares, 1.0], squares))


@pytest.mark.parametrize("mean", [0.06, 0.1, 0.17, 0.3])
def test_no_shares_on_a_grid_lose_less(mean):
    # Convex, so that linear interpolation equals the hull.
    curves = Curves(SHARES, ((0.9, 0.7, 0.4, 0.1), (0.3, 0.2, 0.1, 0.0), (0.5, 0.1, 0.05, 0.04)))
    found = share_out(curves, range(3), mean)
    assert np.mean(found) <= mean + 1e-9 and np.mean(found) > mean - 1 / STEP
    best = sum(loss_of(curves, layer, share) for layer, share in enumerate(found))
    grid = np.arange(0.05, 1.0001, 0.005)
    for pair in itertools.product(grid, grid):
        last = 3 * mean - sum(pair)
        if 0.05 <= last <= 1:
            other = sum(loss_of(curves, i, share) for i, share in enumerate([*pair, last]))
            assert best <= other + 3e-3 * curves.errors[0][0]


errors = st.lists(st.floats(0, 1), min_size=len(SHARES), max_size=len(SHARES))


@settings(deadline=None, max_examples=200)
@given(st.lists(errors, min_size=1, max_size=6), st.floats(0.001, 1))
def test_shares_have_the_mean_whatever_was_measured(rows, mean):
    curves = Curves(SHARES, tuple(map(tuple, rows)))
    found = share_out(curves, range(len(rows)), mean)
    assert all(0 < share <= 1 for share in found)
    assert np.mean(found) <= mean + 1e-6
    assert np.mean(found) >= mean - 1 / STEP
    assert mean <= SHARES[0] or min(found) >= SHARES[0] - 1 / STEP
    if mean == 1:
        assert set(found) == {1.0}


def test_layers_that_lose_the_same_get_the_same():
    curves = Curves(SHARES, ((0.4, 0.3, 0.2, 0.1),) * 4)
    spread = share_out(curves, range(4), 1.0)
    assert spread == (1.0,) * 4
    assert share_out(curves, [1, 3], 0.02) == (0.02, 0.02)


def model_with(errors: list[float]):
    """Return random weights; each layer's error falls from this to a tenth of it along SHARES."""
    model = random_model({1: "one", 2: "gqa", 3: "three"}[len(errors)])
    falling = np.linspace(1, 0.1, len(SHARES))
    both = np.stack([errors[::-1], errors], axis=1)
    loss = (both[:, :, None] * falling).astype(np.float32)
    shares = np.asarray(SHARES, np.float32)
    return dataclasses.replace(model, row_loss=loss, row_shares=shares)


def test_an_engine_fetches_the_shares():
    """Hot sets have equal sizes, so that they hold the rows of the largest request."""
    model = model_with([0.1, 0.5])
    engine = Engine(model, policy=STEEP, dense_layers=0, hot_set=1.0)
    decoder = engine.decoder
    budgets = list(decoder.budgets.values())
    assert budgets[1] > budgets[0] and np.mean(budgets) <= STEEP.budget
    run = finished(engine, RAGGED, 8)
    stats = run.stats()
    at = run.prompt_lengths + np.arange(7)[:, None]
    eligible = np.maximum(at + 1 - STEEP.window - STEEP.sinks, 0)
    rows = (np.minimum(budget_rows(budget, jnp.asarray(at)), eligible) for budget in budgets)
    np.testing.assert_array_equal(counts_of(run), decoder.config.num_kv_heads * sum(rows))
    assert 0 < stats.selected_fraction <= STEEP.budget
    sizes = [hot.entries.rows.shape[2] for hot in run.cache.hot if hot.entries is not None]
    assert sizes == [decoder.hot_entries(run.capacity)] * 2
    assert stats.compilations_after_warmup == 0
    assert decoder.request_sizes(100) == [int(100 * budget + 1e-6) for budget in budgets]
    assert decoder.request_size(100) == max(decoder.request_sizes(100))


def test_budgets_are_of_the_query_that_selects():
    model, found = model_with([0.1, 0.5]), []
    for query, ahead in (("own", False), ("plain", True)):
        policy = dataclasses.replace(STEEP, query=query)
        budgets = tuple(Engine(model, policy=policy, dense_layers=0).decoder.budgets.values())
        assert budgets == share_out(model.curves(ahead), range(2), STEEP.budget)
        found.append(budgets)
    own, ahead = found
    assert own[0] > own[1] and ahead == own[::-1]


def test_streamed_layers_have_no_share():
    paper = InfiniGenPaper(layer_budgets="calibrated", budget=0.2)
    decoder = Engine(model_with([0.9, 0.9, 0.5]), policy=paper).decoder
    streamed = [decoder.streams(i) for i in range(decoder.host_layers)]
    assert streamed[:2] == [True, True] and decoder.selecting[0] == 2
    shares = [decoder.budgets[i] for i in decoder.selecting]
    assert np.mean(shares) <= 0.2 and np.mean(shares) > 0.2 - 1 / STEP


def test_a_conversion_that_did_not_measure_is_refused():
    refuses("convert it again", Engine, random_model("gqa"), policy=STEEP)
    assert Engine(random_model("gqa")).decoder.curves is None
    short = dataclasses.replace(model_with([0.5]), row_loss=np.full((1, 2, 4), np.nan, np.float32))
    assert Engine(short).decoder.curves is None


def test_the_default_and_the_papers_form():
    model = model_with([0.0, 0.5, 0.1])
    assert Engine(model).decoder.curves == model.curves(ahead=False)
    assert Engine(model, policy=InfiniGenPaper()).decoder.curves is None
    assert Engine(model, policy=Quest()).decoder.curves is None
    looking = Engine(model, policy=InfiniGen(query="plain")).decoder
    assert looking.curves == model.curves(ahead=True)
    assert looking.policy.layer_budgets == "calibrated"  # pyright: ignore[reportAttributeAccessIssue]
    refuses("use auto, equal or calibrated", InfiniGen, layer_budgets="uniform")
