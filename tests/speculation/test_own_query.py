"""Sources of a layer's request: its own query, an input, or what is resident."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import (
    SPARSE,
    TAILED,
    check_speculated_logits,
    counts_of,
    finished,
    moments_of,
    random_basis,
    random_model,
    scores_of,
)
from tiny import TEXT, refuses

from infinigen_jax import Basis, Engine, InfiniGen, InfiniGenPaper, Model, Pool, load
from infinigen_jax.cache.layers import DenseLayer, Resident, Sliding, Slots
from infinigen_jax.checkpoint.skew_file import Ahead
from infinigen_jax.convert.calibrate import CalibrationTokens, Calibrator
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.loading.load import DENSE_UNKNOWN
from infinigen_jax.models.forward import causal_attention
from infinigen_jax.ops.attention import attend
from infinigen_jax.settings.policy import SOURCES
from infinigen_jax.skew.basis import balanced_basis
from infinigen_jax.speculation.query import (
    choose_source,
    own_query,
    partial_keys,
    speculation_weights,
)
from infinigen_jax.transfer import Transfer


@pytest.mark.slow
def test_its_tail_equals_the_tail_of_a_prefetched_layer():
    """In a model of one layer, both queries are the layer's own; only the tail's code differs."""
    model = random_model("one")
    own = dataclasses.replace(TAILED, query="own", tail_tokens=8)
    ahead = dataclasses.replace(own, query="plain")
    np.testing.assert_allclose(scores_of(model, own), scores_of(model, ahead), rtol=1e-4, atol=1e-4)


def test_the_engine_chooses_it_where_nothing_has_to_be_moved(monkeypatch):
    model = random_model("gqa")

    def query_of(policy, **settings) -> str:
        chosen = Engine(model, policy=policy, **settings).decoder.policy
        assert isinstance(chosen, InfiniGen)
        return chosen.query

    assert query_of(InfiniGen()) == "own"
    assert query_of(InfiniGen(), pool=Pool(tokens=64)) == "own"
    assert query_of(InfiniGen(query="plain")) == "plain"
    assert query_of(InfiniGenPaper()) == "plain"
    monkeypatch.setattr("infinigen_jax.engine.runtime.make_transfer", lambda name: Transfer())
    assert query_of(InfiniGen()) == "plain"
    assert query_of(InfiniGen(query="own")) == "own"


def test_a_narrow_index_tells_of_a_true_query_what_it_can():
    """Scores have the least error of rank r, as of `skew.basis.balanced_basis`."""
    model = random_model("gqa")
    config, rng = model.config, np.random.default_rng(3)
    k, d = config.num_kv_heads, config.head_dim
    spread = np.geomspace(1, 0.01, d)
    mixed = rng.normal(size=(2, k, d, d)) * spread[:, None]
    keys = np.einsum("tkd,kde->tke", rng.normal(size=(2000, k, d)), mixed[0])
    queries = np.einsum("tkd,kde->tke", rng.normal(size=(2000, k, d)), mixed[1])
    ours, theirs = balanced_basis(moments_of(queries, keys))
    pair = Basis(jnp.asarray(ours, jnp.float32), jnp.asarray(theirs, jnp.float32))
    model = dataclasses.replace(
        model, skew="balanced", bases=(pair,) * config.num_layers, key_mean=None
    )
    columns = d // 4
    weights = speculation_weights(model, 0, columns, query="own", true=True)
    assert weights["inverse"].shape == (k, columns, d)
    index = partial_keys(weights, jnp.asarray(keys, jnp.float32).swapaxes(0, 1)[None], columns)
    asked = jnp.asarray(queries[:50], jnp.float32)
    true = np.einsum("qkd,tkd->qkt", queries[:50], keys)

    def error(weights) -> float:
        query = own_query(weights, asked[:, :, None], columns)
        scores = np.einsum("qkgr,krt->qkt", query, index[0])
        return float(np.square(scores - true).mean())

    inverse = np.linalg.inv(theirs)[:, :columns]
    np.testing.assert_allclose(weights["inverse"], inverse, rtol=1e-4, atol=1e-4)
    least = error({"inverse": pair.query[..., :columns].mT})
    assert error(weights) == pytest.approx(least, rel=1e-3)
    assert error({"inverse": jnp.linalg.pinv(pair.key[..., :columns])}) > 1.3 * least


@pytest.mark.parametrize("query", ["own", "corrected"])
def test_directions_that_queries_never_took_are_left_out(query):
    """A head without queries leaves out all directions; every result is finite."""
    model = random_model("gqa")
    config, rng = model.config, np.random.default_rng(3)
    assert config.num_kv_heads == 2
    d = config.head_dim
    basis = rng.normal(size=(2, d, d)).astype(np.float32)
    basis[0] = 0
    basis[1, :, 4] *= 1e-6
    basis[1, :, 5] = 0
    inverse = np.linalg.pinv(basis, rcond=1e-9).swapaxes(1, 2)
    pair = Basis(jnp.asarray(inverse), jnp.asarray(basis))
    # A corrected query has a basis of its own, which is no inverse of the keys'.
    projection = {"weight": np.zeros((config.query_width, config.hidden_size), np.float32)}
    ahead = Ahead(projection, Basis(jnp.asarray(basis), jnp.asarray(basis)))
    layers = {"bases": (pair,) * config.num_layers, "ahead": (ahead,) * config.num_layers}
    model = dataclasses.replace(model, skew="balanced", **layers)
    own = np.asarray(speculation_weights(model, 0, d, query=query, true=True)["inverse"])
    assert (own[0] == 0).all() and (own[1, 4:6] == 0).all()
    kept = np.arange(d) != 5
    product = own[1] @ basis[1][:, kept]
    expected = np.eye(d)[:, kept]
    expected[4] = 0
    others = np.arange(d - 1) != 4
    np.testing.assert_allclose(product[:, others], expected[:, others], atol=1e-4)


def balanced(name: str) -> Model:
    """With queries by one factor, and keys by its inverse transposed."""
    model = random_model(name, with_basis=True)
    config, bases = model.config, []
    stretch = jnp.asarray(np.geomspace(8, 1 / 8, config.head_dim), jnp.float32)[None, None]
    for i in range(config.num_layers):
        a = random_basis(config.num_kv_heads, config.head_dim, i).query
        bases.append(Basis(a * stretch, a / stretch))
    return Model.from_params(config, model.params, model.dtype, bases=bases, skew="balanced")


CASES = {
    "opt, absorbed": lambda: random_model("opt", with_basis=False),
    "opt, with basis": lambda: random_model("opt", with_basis=True),
    "opt, balanced": lambda: balanced("opt"),
    "rope, gqa": lambda: random_model("gqa"),
    "biases on queries and keys": lambda: random_model("qwen2"),
    "norms on queries and keys": lambda: random_model("qwen3"),
}


@pytest.mark.parametrize("case", CASES)
def test_all_columns_and_own_input_give_the_true_logits(case):
    check_speculated_logits(CASES[case](), 1)


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
    layers = []
    for layer in model.params["layers"]:
        scale = jnp.asarray(rng.normal(size=model.config.hidden_size), "f")
        layers.append(layer | {"attention_norm": {"scale": scale}})
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
    """The calibration attends to the same sinks and recent tokens."""
    rng = np.random.default_rng(0)
    s, heads, kv, d = 40, 4, 2, 8
    q, k, v = (jnp.asarray(rng.normal(size=(s, n, d)).astype(np.float32)) for n in (heads, kv, kv))
    slots = Slots(3, 8)
    dense = DenseLayer(*jnp.zeros((2, 1, kv, 64, d), jnp.float32))
    sliding = Sliding(*jnp.zeros((2, 1, kv, 16, d), jnp.float32))
    host = Resident.empty(1, kv, d, slots, jnp.float32)
    expected = {
        "all": causal_attention(q, k, v, window=slots.window, sinks=slots.sinks),
        "sliding": causal_attention(q, k, v, window=slots.window),
    }

    @jax.jit
    def step(caches: list[Any], place: jax.Array) -> tuple[list[Any], list[jax.Array]]:
        at, key, value = place[None], k[place][None], v[place][None]
        dense, host, sliding = caches
        host = host.write(key, value, at, slots)
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
    models: dict[str, Any] = {name: load(tmp_path / name) for name in SOURCES}
    assert all(model.speculate_from == name for name, model in models.items())
    pairs = zip(models["input"].ahead, models["resident"].ahead, strict=True)
    for i, (one, other) in enumerate(pairs):
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
    given = (convert, tmp_path, tmp_path / "x")
    resident = {"speculate_from": "resident", "skew": "svd"}
    refuses("speculate_from resident: .* svd has none", *given, **resident)
    refuses("speculate_from output: use input or resident", *given, speculate_from="output")
