"""Neurons of a skipped MLP in a query that looks ahead."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import random_model
from safetensors.numpy import load_file, save_file
from tiny import TEXT

from infinigen_jax import convert
from infinigen_jax.checkpoint.hf_folder import read_config
from infinigen_jax.checkpoint.manifest import AHEAD_FILE, MANIFEST_FILE, file_record
from infinigen_jax.convert.calibrate import CalibrationTokens, Calibrator
from infinigen_jax.errors import InputError
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.loading.load import load
from infinigen_jax.models import Params, blueprint
from infinigen_jax.models.llama import ACTIVATIONS
from infinigen_jax.skew.neurons import (
    Mlp,
    activations,
    gated,
    number_of,
    picked,
    projected,
    projection_shapes,
)
from infinigen_jax.skew.query_correction import corrected_projection


def with_random_norms(name: str) -> tuple[Any, Params]:
    """A model's configuration and a layer of it, whose norms are not those of a new model."""
    model = random_model(name)
    rng = np.random.default_rng(2)
    params = dict(model.params["layers"][0])
    for norm in ("attention_norm", "mlp_norm"):
        params[norm] = {
            part: jnp.asarray(rng.normal(size=x.shape), jnp.float32)
            for part, x in params[norm].items()
        }
    return model.config, params


@pytest.mark.parametrize("name", ["gqa", "opt"])
def test_the_mlps_own_activations_from_a_state_under_another_norm(name: str):
    config, params = with_random_norms(name)
    layer: Any = blueprint(config, jnp.float32).layer(params)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(5, config.hidden_size)), jnp.float32)
    whole = Mlp(params).under(params["attention_norm"])
    found = activations(config, whole, layer.attention_input(x))
    # By what the layer makes of them.
    np.testing.assert_allclose(layer.down(found), layer.mlp(x), rtol=2e-4, atol=2e-4)
    some = np.array([1, 4, 7])
    few = {part: picked(config, value, some) for part, value in whole.items()}
    a = layer.attention_input(x)
    np.testing.assert_allclose(activations(config, few, a), found[:, some], rtol=1e-5, atol=1e-6)


def test_a_channel_that_a_norm_takes_away_is_not_made_up():
    config, params = with_random_norms("gqa")
    norm = {"scale": params["attention_norm"]["scale"].at[3].set(0.0)}
    whole = Mlp(params).under(norm)
    assert all(np.isfinite(part).all() for part in whole.values())
    np.testing.assert_array_equal(whole["inner_kernel"][3], 0)


@pytest.mark.parametrize("name", ["gqa", "opt"])
def test_those_are_chosen_that_a_query_would_notice(name: str):
    config, params = with_random_norms(name)
    rng = np.random.default_rng(4)
    seen = [2, 5, 6, 9, 11, 12, 14, 15]
    down = np.zeros_like(params["down"]["kernel"])
    down[seen] = rng.normal(size=down[seen].shape)
    down[0] = 100.0 * np.eye(config.hidden_size)[0]  # to a channel that no query reads
    query = rng.normal(size=(config.hidden_size, config.query_width))
    query[0] = 0.0
    params["down"] = params["down"] | {"kernel": jnp.asarray(down)}
    mlp = Mlp(params)
    whole = mlp.under(params["attention_norm"])
    a = jnp.asarray(rng.normal(size=(2, 30, config.hidden_size)), jnp.float32)
    there = jnp.ones((2, 30), jnp.float32)
    chosen = mlp.chosen(config, whole, a, there, query, len(seen))
    for part, value in whole.items():
        np.testing.assert_array_equal(chosen[part], picked(config, value, np.array(seen)))
    # Padding does not count: what it holds changes nothing.
    padded = mlp.chosen(
        config, whole, a.at[1, 20:].set(1e3), there.at[1, 20:].set(0.0), query, len(seen)
    )
    np.testing.assert_array_equal(padded["inner_kernel"], chosen["inner_kernel"])


def test_a_relation_through_neurons_is_recovered():
    """The missing part is a function of neurons alone, which no linear map has."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 8))
    h = np.maximum(x @ rng.normal(size=(8, 5)), 0)
    y = x + h @ rng.normal(size=(5, 8))
    kernel = rng.normal(size=(8, 6))

    def left(outer: np.ndarray | None, found: Any) -> float:
        guess = x @ found.kernel + found.bias + (0 if outer is None else h @ outer)
        return float(np.square(y @ kernel - guess).mean())

    without, with_them = (corrected_projection(x, y, kernel, None, n) for n in (None, h))
    assert without.outer is None
    assert left(with_them.outer, with_them) < 1e-4 * left(None, without)
    # Of neurons that never vary nothing is made.
    still = corrected_projection(x, y, kernel, None, np.ones_like(h))
    np.testing.assert_array_equal(still.outer, 0)
    assert np.isfinite(still.kernel).all()


@pytest.mark.parametrize("name", ["gqa", "opt"])
@pytest.mark.parametrize("source", ["input", "resident"])
def test_a_query_that_sees_neurons_is_nearer(name: str, source: str):
    model = random_model(name)
    ids = np.random.default_rng(0).integers(3, 96, (4, 256)).astype(np.int32)
    text = CalibrationTokens(ids, np.ones_like(ids, bool), "")
    errors = []
    for neurons in (0, number_of(model.config, 1.0)):
        given = (model.config, text, model.params["embedding"], source, neurons)
        calibrator = Calibrator(*given)
        off = []
        for number, params in enumerate(model.params["layers"]):
            calibrator.layer(params)
            projection, _ = calibrator.ahead(params)
            assert calibrator._attended is not None
            guess, true = calibrator._guesses[0], calibrator._attended[1]
            off.append(float(jnp.sum(jnp.square(guess - true))))
            shapes = projection_shapes(model.config, number, neurons)
            assert {n: part.shape for n, part in projection.items()} == shapes
        errors.append(off[1:])
    without, with_them = np.array(errors)
    assert (with_them < without).all()


def test_a_conversion_has_them_or_not(tiny: Any, tmp_path: Path):
    source = tiny("llama").folder
    for name, share in (("none", 0.0), ("half", 0.5)):
        convert.convert(source, tmp_path / name, calibration=TEXT, neurons=share)
    config = read_config(source)[1]
    number = number_of(config, 0.5)
    assert number == config.intermediate_size // 2 // 8 * 8 > 0
    models = {name: load(tmp_path / name) for name in ("none", "half")}
    for name, model in models.items():
        assert model.ahead is not None
        wanted = number if name == "half" else 0
        for i, ahead in enumerate(model.ahead):
            shapes = {part: value.shape for part, value in ahead.projection.items()}
            assert shapes == projection_shapes(config, i, wanted)


def test_neurons_of_another_number_are_refused(tiny: Any, tmp_path: Path):
    folder = convert.convert(tiny("llama").folder, tmp_path / "x", calibration=TEXT)
    tensors = load_file(folder / AHEAD_FILE)
    tensors["layers.1.inner_bias"] = tensors["layers.1.inner_bias"][:-1].copy()
    save_file(tensors, folder / AHEAD_FILE)
    manifest = json.loads((folder / MANIFEST_FILE).read_text())
    manifest["files"][AHEAD_FILE] = file_record(folder / AHEAD_FILE)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"layers.1.inner_bias is .* instead of"):
        checkpoint.load(folder)


def test_shares(tiny: Any, tmp_path: Path):
    config = random_model("gqa").config
    assert number_of(config, 0.0) == 0
    assert number_of(config, 1e-6) == 8
    assert number_of(config, 1.0) == config.intermediate_size // 8 * 8
    with pytest.raises(InputError, match="neurons 1.5: it must be at least 0 and at most 1"):
        convert.convert(tiny("llama").folder, tmp_path / "x", neurons=1.5)


@pytest.mark.parametrize("name", ["gqa", "opt"])
def test_projected_is_what_it_says(name: str):
    config = random_model(name).config
    rng = np.random.default_rng(1)
    shapes = projection_shapes(config, 1, 8)
    parts = {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}
    a = jnp.asarray(rng.normal(size=(3, config.hidden_size)), jnp.float32)
    inner = a @ parts["inner_kernel"] + parts["inner_bias"][None]
    act = ACTIVATIONS[config.activation]
    h = act(inner[:, :8]) * inner[:, 8:] if gated(config) else act(inner)
    expected = a @ parts["kernel"] + parts["bias"][None] + h @ parts["outer"]
    np.testing.assert_allclose(projected(config, parts, a), expected, rtol=1e-4, atol=1e-4)
    without = {n: parts[n] for n in ("kernel",)}
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(projected(config, without, a), a @ parts["kernel"], rtol=1e-4)
