"""Rows requested two layers before they are read."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import TEXT

from infinigen_jax import generate
from infinigen_jax.checkpoint import load
from infinigen_jax.convert import convert
from infinigen_jax.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.evaluation.configurations import configurations
from infinigen_jax.options import add_engine_options, make_policy
from infinigen_jax.policies import InfiniGen
from infinigen_jax.pool import Pool
from infinigen_jax.speculation import choose_layers_ahead
from infinigen_jax.transfer import XlaTransfer
from infinigen_jax.workspace import decode_bytes
from tests.runtime import ALL, SPARSE, counts_of, engine, finished, random_model, tokens_of

TWO = dataclasses.replace(SPARSE, layers_ahead=2)
ALL_TWO = dataclasses.replace(ALL, layers_ahead=2)


def test_what_is_requested_where():
    def targets(policy: Any, dense_layers: int) -> list[tuple[int, ...]]:
        decoder = engine("deep", policy, dense_layers).decoder
        return [decoder.fetches_for(i) for i in range(4)]

    # Host layer n is layer n + dense_layers of the model.
    assert targets(SPARSE, 0) == [(1,), (2,), (3,), (-1,)]
    assert targets(TWO, 0) == [(1, 2), (3,), (-1,), (-1,)]
    assert targets(TWO, 1) == [(0, 1), (2,), (-1,), (-1,)]
    assert targets(TWO, 2) == [(-1, 0), (1,), (-1,), (-1,)]
    own = dataclasses.replace(SPARSE, query="own")
    assert targets(own, 1) == [(-1,), (0,), (1,), (2,)]
    assert [engine("deep", TWO, 1).decoder.awaits_for(i) for i in range(4)] == [0, 1, 2, -1]
    assert [engine("deep", own, 1).decoder.awaits_for(i) for i in range(4)] == [-1, 0, 1, 2]


@pytest.mark.parametrize(
    "dense_layers", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3)]]
)
def test_everything_fetched_is_the_full_cache(dense_layers):
    expected = finished(engine("deep", ALL, dense_layers))
    run = finished(engine("deep", ALL_TWO, dense_layers))
    assert run.new_tokens == expected.new_tokens
    np.testing.assert_array_equal(counts_of(run), counts_of(expected))


def test_rows_are_those_of_the_input_two_layers_before():
    """Layers that add nothing have the input of the layers before: the guesses are then equal."""
    model = random_model("deep")
    layers = []
    for layer in model.params["layers"]:
        quiet = {name: jax.tree.map(jnp.zeros_like, layer[name]) for name in ("o", "down")}
        norm = {"attention_norm": model.params["layers"][0]["attention_norm"]}
        layers.append(layer | quiet | norm)
    still = dataclasses.replace(model, params=model.params | {"layers": layers})
    runs = [finished(Engine(still, policy=policy, dense_layers=1)) for policy in (SPARSE, TWO)]
    np.testing.assert_array_equal(counts_of(runs[0]), counts_of(runs[1]))
    assert np.sum(counts_of(runs[0])) > 0
    others = [finished(engine("deep", policy, 1)) for policy in (SPARSE, TWO)]
    assert not np.array_equal(counts_of(others[0]), counts_of(others[1]))


@pytest.mark.parametrize(
    "settings", [pytest.param({"hot_set": 2.0}, marks=pytest.mark.slow), {"transfer": "copied"}]
)
def test_transfers_give_the_same(settings, monkeypatch):
    """With a hot set, each layer's is that of its own rows; and where rows are really moved."""
    expected = finished(engine("deep", TWO, 1))
    if "transfer" in settings:
        monkeypatch.setattr("infinigen_jax.engine.make_transfer", lambda name: XlaTransfer())
        run = finished(Engine(random_model("deep"), policy=TWO, dense_layers=1))
    else:
        run = finished(engine("deep", TWO, 1, **settings))
    assert run.new_tokens == expected.new_tokens
    np.testing.assert_array_equal(counts_of(run), counts_of(expected))


@pytest.mark.slow
def test_with_sliding_windows_between():
    model = "windows"
    assert tokens_of(engine(model, ALL_TWO, 0)) == tokens_of(engine(model, ALL, 0))


def test_the_corrected_query_is_fitted_to_the_input_two_layers_before(tiny, tmp_path):
    source = tiny("llama").folder
    folders = [convert(source, tmp_path / str(n), calibration=TEXT, layers_ahead=n) for n in (1, 2)]
    one, two = (load(folder) for folder in folders)
    assert (one.layers_ahead, two.layers_ahead) == (1, 2)
    assert json.loads((folders[1] / "infinigen.json").read_text())["layers_ahead"] == 2
    assert one.ahead is not None and two.ahead is not None
    for i in range(one.config.num_layers):
        same = np.array_equal(one.ahead[i].projection["kernel"], two.ahead[i].projection["kernel"])
        assert same == (i < 2)  # layer 1 has none but layer 0 before it
    # Whoever does not ask for a number gets that of the conversion.
    decoder = Engine(two, policy=InfiniGen(query="corrected")).decoder
    assert decoder.policy.lead == 2
    with pytest.raises(InputError, match="--layers-ahead 1: .* is for 2; convert it again"):
        Engine(two, policy=InfiniGen(query="corrected", layers_ahead=1))
    assert choose_layers_ahead(two, "plain", 0) == 2
    assert Engine(two, policy=InfiniGen(query="plain", layers_ahead=2)).decoder.policy.lead == 2


def test_the_option(command, tmp_path):
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    policy: Any = make_policy(parser.parse_args(["--layers-ahead", "2", "--query", "plain"]))
    assert (policy.layers_ahead, policy.lead) == (2, 2)
    several = argparse.ArgumentParser()
    add_engine_options(several, several=True)
    made = configurations(
        several.parse_args(["--query", "plain", "--layers-ahead", "1", "2"]), reference=False
    )
    assert [c.policy.lead for c in made] == [1, 2]  # pyright: ignore[reportAttributeAccessIssue]
    status, out, err = command(generate.main, "--prompt", "The", "--layers-ahead", "3")
    assert status == 2 and not out and err.startswith("error: --layers-ahead 3")
    # The embedded model's corrected query looks one layer ahead.
    status, out, err = command(
        generate.main, "--prompt", "The", "--layers-ahead", "2", "--query", "corrected"
    )
    assert status == 2 and not out and "convert it again with --layers-ahead 2" in err


def test_an_own_query_has_no_lead():
    """Settings that change nothing are equal: programs are shared, conversations resumed."""
    own = [dataclasses.replace(SPARSE, query="own", layers_ahead=n) for n in (0, 2)]
    one, two = (Engine(random_model("deep"), policy=policy).decoder for policy in own)
    assert one == two and one.policy.lead == 0


@pytest.mark.slow
def test_pools_and_their_hot_sets():
    settings = {"dense_layers": 0, "pool": Pool(share=1.0), "hot_set": 2.0}
    policy = dataclasses.replace(ALL_TWO, window=4)
    assert tokens_of(engine("deep", policy, **settings)) == tokens_of(engine("deep", ALL, 0))


def test_a_plan_has_room_for_the_rows_of_two_layers_under_way():
    one, two = (
        dataclasses.replace(engine("deep", policy, 1).decoder, transfer=XlaTransfer())
        for policy in (SPARSE, TWO)
    )
    config, rows = one.config, SPARSE.request_size(64)
    layer = rows * 3 * config.num_kv_heads * 2 * config.head_dim * 4
    assert decode_bytes(two, 3, 64) - decode_bytes(one, 3, 64) == layer


def test_refusals(tiny, tmp_path):
    with pytest.raises(InputError, match="--layers-ahead 3"):
        InfiniGen(layers_ahead=3)
    with pytest.raises(InputError, match="--layers-ahead 3"):
        convert(tmp_path, tmp_path / "x", layers_ahead=3)
    with pytest.raises(InputError, match="--layers-ahead 2: .* --skew svd has none"):
        convert(tmp_path, tmp_path / "x", layers_ahead=2, skew="svd")
    with pytest.raises(InputError, match="--layers-ahead 2: .*--schedule fused"):
        Engine(random_model("deep"), policy=TWO, schedule="layerwise")
    folder = convert(tiny("llama").folder, tmp_path / "y", skew="none")
    manifest: Path = folder / "infinigen.json"
    value = json.loads(manifest.read_text()) | {"layers_ahead": 7}
    manifest.write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"infinigen.json: damaged, layers_ahead is 7"):
        load(folder)
