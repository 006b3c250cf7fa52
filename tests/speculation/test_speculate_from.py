"""Rows requested by the state after attention of the layer before to its resident rows."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import SPARSE, counts_of, finished, random_model
from tiny import TEXT, refuses

from infinigen_jax.cache.layers import DenseLayer, Resident, Sliding, Slots
from infinigen_jax.convert.calibrate import CalibrationTokens, Calibrator
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.engine.engine import Engine
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import DENSE_UNKNOWN, Model, load
from infinigen_jax.models.forward import causal_attention
from infinigen_jax.ops.attention import attend
from infinigen_jax.policies import InfiniGen, InfiniGenPaper
from infinigen_jax.settings.policy import SOURCES
from infinigen_jax.speculation.query import choose_source


def without_attention(name: str) -> Model:
    """Return layers that add nothing: the state after attention is the next layer's input."""
    model = random_model(name)
    layers = [
        layer | {part: jax.tree.map(jnp.zeros_like, layer[part]) for part in ("o", "down")}
        for layer in model.params["layers"]
    ]
    return dataclasses.replace(model, params=model.params | {"layers": layers})


def test_the_resident_source_uses_the_norm_of_the_next_layer():
    model = without_attention("gqa")
    rng = np.random.default_rng(0)
    layers = [
        layer
        | {"attention_norm": {"scale": jnp.asarray(rng.normal(size=model.config.hidden_size), "f")}}
        for layer in model.params["layers"]
    ]
    model = dataclasses.replace(model, params=model.params | {"layers": layers})
    exact = dataclasses.replace(SPARSE, partial_ratio=1.0, index_dtype="float32")
    own, resident = (
        finished(Engine(model, policy=dataclasses.replace(exact, **changed), dense_layers=1))
        for changed in ({"query": "own"}, {"speculate_from": "resident"})
    )
    assert np.sum(counts_of(own)) > 0
    np.testing.assert_array_equal(counts_of(resident), counts_of(own))
    assert resident.new_tokens == own.new_tokens


def test_what_is_resident_is_the_same_of_every_kind_of_cache():
    """The calibration attends to the same sinks and recent tokens.

    Caches are of a layer on the host, of one on the device, and of a window.
    """
    rng = np.random.default_rng(0)
    s, heads, kv, d = 40, 4, 2, 8
    q, k, v = (jnp.asarray(rng.normal(size=(s, n, d)).astype(np.float32)) for n in (heads, kv, kv))
    slots = Slots(3, 8)
    dense = DenseLayer(*jnp.zeros((2, 1, kv, 64, d), jnp.float32))
    sliding = Sliding(*jnp.zeros((2, 1, kv, 16, d), jnp.float32))
    host = Resident.empty(1, kv, 2 * d, slots, jnp.float32)
    expected = {
        "all": causal_attention(q, k, v, window=slots.window, sinks=slots.sinks),
        "sliding": causal_attention(q, k, v, window=slots.window),
    }

    @jax.jit
    def step(caches: list[Any], place: jax.Array) -> tuple[list[Any], list[jax.Array]]:
        at, key, value = place[None], k[place][None], v[place][None]
        dense, host, sliding = caches
        host = host.write(jnp.concatenate([key, value], axis=-1), at, slots)
        dense, sliding = (local.write(key, value, at) for local in (dense, sliding))
        query = q[place].reshape(1, kv, heads // kv, d)
        recent = at, slots, jnp.float32
        near = [dense.near(*recent), host.part(at, slots), sliding.near(*recent)]
        return [dense, host, sliding], [attend(query, part).reshape(heads, d) for part in near]

    caches: list[Any] = [dense, host, sliding]
    for place in range(s):
        caches, found = step(caches, jnp.int32(place))
        for kind, output in zip(("all", "all", "sliding"), found, strict=True):
            np.testing.assert_allclose(output, expected[kind][place], rtol=1e-4, atol=1e-5)


def calibrated(model: Model, source: str) -> Iterator[tuple[Calibrator, Any]]:
    """Yield a calibrator that has read layer after layer, and the layer's parameters."""
    ids = np.random.default_rng(0).integers(3, 96, (1, 400)).astype(np.int32)
    text = CalibrationTokens(ids, np.ones_like(ids, bool), "")
    calibrator = Calibrator(model.config, text, model.params["embedding"], source)
    for params in model.params["layers"]:
        calibrator.layer(params)
        yield calibrator, params


def test_calibration_sees_what_decoding_does():
    """If layers add nothing, the substitute for the next layer's input is that input."""
    for calibrator, params in calibrated(without_attention("gqa"), "resident"):
        projection, _ = calibrator.ahead(params)
        assert np.allclose(projection["weight"], params["q"]["weight"], atol=1e-4)


def test_behind_what_is_resident_dense_layers_are_told_by_the_input():
    """The loss of a guess from the input decides, whichever source is converted for."""
    found: dict[str, list[np.ndarray]] = {"resident": [], "input": []}
    for source, losses in found.items():
        for calibrator, params in calibrated(random_model("gqa"), source):
            calibrator.ahead(params)
            losses.append(calibrator.loss(params))
    for resident, before in zip(*found.values(), strict=True):
        assert len(resident) == 3 and len(before) == 2
        np.testing.assert_array_equal(resident[0], before[0])
        np.testing.assert_allclose(resident[2], before[1], rtol=1e-4)


def test_the_corrected_query_is_of_what_the_conversion_was_for(tiny: Any, tmp_path: Any):
    source = tiny("llama").folder
    for name in SOURCES:
        convert(source, tmp_path / name, calibration=TEXT, speculate_from=name)
    models = {name: load(tmp_path / name) for name in SOURCES}
    assert {name: model.speculate_from for name, model in models.items()} == {
        "input": "input",
        "resident": "resident",
    }
    assert models["input"].ahead is not None and models["resident"].ahead is not None
    for i, (one, other) in enumerate(
        zip(models["input"].ahead, models["resident"].ahead, strict=True)
    ):
        weights = one.projection["weight"], other.projection["weight"]
        assert np.array_equal(*weights) == (i == 0)  # layer 0 has its own input in any case
    corrected = InfiniGen(query="corrected")
    for name, model in models.items():
        policy = Engine(model, policy=corrected).decoder.policy
        assert policy.source == name
        other = "input" if name == "resident" else "resident"
        wanted = dataclasses.replace(corrected, speculate_from=other)
        refuses(f"speculate_from {other}: .* is for {name}", Engine, model, policy=wanted)
        plain = InfiniGen(query="plain", speculate_from=other)
        assert Engine(model, policy=plain).decoder.policy.source == other
        assert choose_source(model, "plain", "auto") == name
        assert Engine(model, policy=InfiniGenPaper()).decoder.policy.source == "input"
    # Programs are shared between settings that mean the same.
    own = [InfiniGen(query="own", speculate_from=s) for s in SOURCES]
    assert len({Engine(models["input"], policy=policy).decoder for policy in own}) == 1


def test_what_was_measured_of_one_query_is_not_for_another():
    """Dense layers and budgets are known only for the query of the conversion."""
    model = random_model("gqa")
    layers = model.config.num_layers
    loss = np.full((layers, 2, 3), [[0.02], [0.02]], np.float32)
    loss[0, 1] = 0.2  # the first layer cannot be guessed
    measured = dataclasses.replace(
        model,
        sparse_loss=loss[:, :, 1],
        row_loss=loss * np.array([3, 2, 1], np.float32),
        row_shares=np.array([0.01, 0.05, 0.2], np.float32),
        speculate_from="resident",
    )

    def chosen(**settings: Any) -> tuple[int, Any]:
        decoder = Engine(measured, policy=InfiniGen(**settings)).decoder
        return decoder.dense_layers, decoder.policy.layer_budgets  # pyright: ignore

    assert chosen(query="plain") == (1, "calibrated")
    assert chosen(query="plain", speculate_from="input") == (DENSE_UNKNOWN, "equal")
    assert chosen(query="own", speculate_from="input") == (0, "calibrated")


def test_sources_that_are_refused(tiny: Any, tmp_path: Any):
    """Sources of an earlier release, without a correction, and unknown."""
    folder = convert(tiny("llama").folder, tmp_path / "y", skew="none")
    manifest = folder / "infinigen.json"
    value = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(value | {"speculate_from": "attention"}))
    refuses(r"json: speculate_from is 'attention'.*; convert the mo", load, folder)
    with pytest.raises(InputError, match="speculate_from resident: .* svd has none"):
        convert(tmp_path, tmp_path / "x", speculate_from="resident", skew="svd")
    with pytest.raises(InputError, match="speculate_from output: use input or resident"):
        convert(tmp_path, tmp_path / "x", speculate_from="output")
