"""The corrected layer-ahead query: regression, its shrinkage, and its conversion."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runtime import plain_pass
from tiny import make_tiny, refuses

from infinigen_jax import Engine, InfiniGen, InfiniGenPaper
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.models import blueprint
from infinigen_jax.models.linear import project
from infinigen_jax.skew.query_correction import corrected_projection
from infinigen_jax.speculation.query import speculate_query, speculation_weights

IDS = [int(i) for i in np.random.default_rng(1).integers(3, 96, 400)]


def related(n: int, e: int, noise: float, seed: int = 0):
    """Return inputs, targets that a map makes of them, and a projection."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, e)) * np.geomspace(1, 0.1, e) + rng.normal(size=e)
    y = x @ (np.eye(e) + 0.3 * rng.normal(size=(e, e))) + rng.normal(size=e)
    y += noise * rng.normal(size=y.shape)
    return x, y, rng.normal(size=(e, 6)), rng.normal(size=6)


def error(x, y, kernel, bias, projection) -> float:
    return float(np.square(y @ kernel + bias - x @ projection[0] - projection[1]).mean())


@pytest.mark.parametrize(("n", "e"), [(400, 8), (40, 64)])  # fewer tokens than dimensions
def test_new_text_is_no_worse_than_with_the_plain_input(n, e):
    x, y, kernel, bias = related(2 * n, e, 0.3)
    found = corrected_projection(x[:n], y[:n], kernel, bias)
    plain = (kernel, bias + ((y - x)[:n] @ kernel).mean(axis=0))
    assert error(x[n:], y[n:], kernel, bias, found) <= error(x[n:], y[n:], kernel, bias, plain)


def test_an_unrelated_input_keeps_its_own_kernel():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 40))
    found = corrected_projection(x, x + rng.normal(size=(20, 40)), np.eye(40))
    assert found.ridge >= 1.0
    same = corrected_projection(x, x, np.eye(40))
    np.testing.assert_allclose(same.kernel, np.eye(40), atol=1e-12)
    np.testing.assert_allclose(same.bias, 0, atol=1e-12)


FAMILIES = {"llama": {"num_key_value_heads": 2}, "opt": {}}
FAMILIES["qwen3"] = {"num_key_value_heads": 2, "head_dim": 20}
QWEN3 = pytest.param("qwen3", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def conversions(tmp_path_factory):
    """Return `conversions(family)`, which gives the folder of a converted model."""

    @functools.cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        made = make_tiny(folder / "source", family, num_hidden_layers=2, **FAMILIES[family])
        return convert(made.folder, folder / "out", calibration=IDS, speculate_from="input")

    return make


@pytest.fixture
def converted(conversions):
    return conversions("llama")


@pytest.mark.parametrize("family", ["llama", "opt", QWEN3])
def test_the_corrected_query_is_nearer_to_the_true_one(conversions, family):
    model: Any = checkpoint.load(conversions(family))
    layers, _ = plain_pass(model, np.array(IDS[:392], np.int32).reshape(7, 56))
    positions = jnp.broadcast_to(jnp.arange(56), (7, 56))
    for number, ahead in enumerate(model.ahead):
        layer, before = layers[number].module, layers[max(number - 1, 0)].a
        true = layer.query(layers[number].a, positions)
        projection = jax.tree.map(jnp.array, ahead.projection)
        guess = layer.finish_query(project(before, projection), positions)
        plain = layer.query(before, positions)
        distances = [float(jnp.sum((true - x) ** 2)) for x in (guess, plain)]
        if number == 0:
            np.testing.assert_allclose(guess, true, rtol=1e-4, atol=1e-5)
        else:
            assert distances[0] < 0.9 * distances[1]


@pytest.mark.parametrize("family", ["llama", "opt", QWEN3])
@pytest.mark.parametrize("basis", ["svd", "balanced"])
def test_all_columns_give_the_scores_of_the_corrected_query(conversions, family, basis):
    """q^ . k^ is h . k with the orthogonal basis, and h M (k - mean), M near I, with the other."""
    model = checkpoint.load(conversions(family))
    config = model.config
    d, k = config.head_dim, config.num_kv_heads
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.normal(size=(3, config.hidden_size)).astype(np.float32))
    positions = jnp.asarray([3, 9, 20], jnp.int32)
    layer = blueprint(config, model.dtype).layer(model.params["layers"][1])
    weights = speculation_weights(model, 1, d, True, basis, "corrected")
    query = np.asarray(speculate_query(config, layer, weights, a, positions, d))
    assert model.ahead is not None and model.key_mean is not None
    projection = jax.tree.map(jnp.array, model.ahead[1].projection)
    guess = layer.finish_query(project(a, projection), positions)
    h = np.asarray(guess).reshape(3, k, -1, d)
    product = np.broadcast_to(np.eye(d), (k, d, d))
    if basis == "balanced":
        pair = model.ahead[1].basis
        product = np.asarray(pair.query) @ np.asarray(pair.key).swapaxes(1, 2)
    h = np.einsum("bkgd,kde->bkge", h, product)
    key = np.linalg.inv(np.asarray(weights["key"])).swapaxes(1, 2)
    np.testing.assert_allclose(query, h @ key, rtol=2e-3, atol=2e-3)
    centre = np.einsum("kd,kdr->kr", model.key_mean[1], np.asarray(weights["key"]))
    np.testing.assert_allclose(weights["centre"], centre, rtol=1e-5, atol=1e-6)


def test_what_a_conversion_does_not_have_is_refused_in_one_line(converted, tmp_path):
    model = checkpoint.load(converted)
    assert model.skew == "balanced" and model.svd_bases is not None
    made = make_tiny(tmp_path / "source", "llama")
    svd = checkpoint.load(convert(made.folder, tmp_path / "svd", calibration=IDS, skew="svd"))
    none = checkpoint.load(convert(made.folder, tmp_path / "none", skew="none"))

    def refused(model, message: str, **settings):
        refuses(message, Engine, model, policy=InfiniGen(**settings), dense_layers=1)

    refused(svd, "basis balanced: .* `skew` svd.* again with balanced", basis="balanced")
    refused(svd, "query corrected: .* `skew` balanced", query="corrected")
    refused(none, "basis svd: .* `skew` none", basis="svd")
    refuses("basis none: use auto, svd or balanced", InfiniGen, basis="none")
    refuses("query odd", InfiniGen, query="odd")


def test_the_paper_preset_keeps_the_paper_basis(converted):
    model = checkpoint.load(converted)
    assert model.svd_bases is not None
    preset = InfiniGenPaper(partial_ratio=1.0)
    orthogonal = InfiniGen(basis="svd", query="plain", partial_ratio=1.0)
    found = preset.prepare(model, 1)
    np.testing.assert_array_equal(found["key"], model.svd_bases[1].key)
    assert "ahead" not in found and not preset.tail
    for name, value in orthogonal.prepare(model, 1).items():
        if name in found:
            np.testing.assert_array_equal(found[name], value)
