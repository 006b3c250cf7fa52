"""Calibration: which tokens it sees, and its bases, and the loss of a layer with few rows."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from runtime import moments_of, random_model, with_config
from tiny import LLAMA, make_tiny, refuses

from infinigen_jax.convert import loss
from infinigen_jax.convert.calibrate import Calibrator, windows
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.engine.engine import Engine
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.models import ModelConfig, Params, blueprint, config_from_hf, random_params
from infinigen_jax.policies import InfiniGenPaper, Quest

SIZES = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
GQA = config_from_hf(LLAMA | SIZES)


def windowed(config: ModelConfig, params: Params, ids: Any, size: int) -> Iterator[Any]:
    """Yield queries and keys of the first layer for each window of a text."""
    architecture = blueprint(config, jnp.float32)
    layer, embedding = architecture.layer(params["layers"][0]), params["embedding"]
    for start in range(0, len(ids), size):
        part = jnp.asarray(ids[start : start + size])
        positions = jnp.arange(len(part))
        a = layer.attention_input(architecture.embedding(embedding).embed(part, positions))
        yield layer.query(a, positions), layer.key_value(a, positions)[0]


def test_absorbed_bases_diagonalise_queries(tiny, tmp_path):
    """`test_convert.py` compares the logits."""
    reference = tiny("opt", hidden_size=64, word_embed_proj_dim=64, num_hidden_layers=1)
    ids = [int(i) for i in np.random.default_rng(1).integers(3, 96, 150)]
    convert(reference.folder, tmp_path / "out", calibration=ids, skew="svd")
    model = checkpoint.load(tmp_path / "out", "float32")
    assert model.bases == (None,) and model.skew == "svd"
    parts = windowed(model.config, model.params, ids, 64)  # 150 tokens make three windows
    queries = (np.asarray(q, np.float64) for q, _ in parts)
    assert_diagonal(np.sum([np.einsum("thd,the->hde", q, q) for q in queries], axis=0))


def test_the_papers_basis_is_of_the_text_where_it_stands(tmp_path):
    """With rotary positions the other bases are for all positions of the model."""
    made = make_tiny(tmp_path / "source", "llama", max_position_embeddings=512)
    model = checkpoint.load(convert(made.folder, tmp_path / "out", calibration=IDS[:150]))
    ((queries, _),) = windowed(model.config, model.params, IDS[:150], 150)
    basis = np.asarray(model.svd_bases[0].key, np.float64)
    turned = np.einsum("tkgd,kdr->tkgr", model.config.grouped(queries), basis)
    assert_diagonal(np.einsum("tkgr,tkgs->krs", turned, turned))


def assert_diagonal(gram: np.ndarray) -> None:
    """Assert that products have descending energies and nothing else."""
    diagonal = np.einsum("hdd->hd", gram)
    off = np.abs(gram - diagonal[:, :, None] * np.eye(gram.shape[-1]))
    assert off.max() <= 1e-5 * diagonal.max()
    assert np.all(np.diff(diagonal, axis=-1) <= 1e-5 * diagonal.max())


def test_padding_of_the_last_window_is_not_counted():
    """Windows of unequal length give the moments of the real tokens alone."""
    config = dataclasses.replace(GQA, max_positions=20)
    params = random_params(config, jnp.float32)
    ids = np.random.default_rng(2).integers(3, 96, 57).astype(np.int32)
    cut = windows(ids, config, 2048, "text", b"")
    assert cut.ids.shape == (3, 20) and cut.count == 57
    ids = ids[:56]
    cut = windows(ids, config, 2048, "text", b"")
    assert cut.ids.shape == (3, 20) and cut.count == 56
    seen = Calibrator(config, cut, params["embedding"]).layer(params["layers"][0])
    pieces = zip(*windowed(config, params, ids, 20), strict=True)
    for found, expected in zip(seen, moments_of(*map(jnp.concatenate, pieces)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=8e-8)


def test_windows_start_with_the_beginning_of_sequence_token_and_respect_the_limit():
    config = dataclasses.replace(GQA, max_positions=20, bos_id=0)
    ids = np.concatenate([[0], np.arange(3, 90)]).astype(np.int32)
    cut = windows(ids, config, 60, "text", b"")
    assert cut.count <= 60 and cut.ids.shape[1] <= 20
    assert np.all(cut.ids[:, 0] == 0) and not np.any(cut.ids[:, 1:][cut.valid[:, 1:]] == 0)
    refuses("11 tokens", windows, ids[:11], config, 60, "text", b"")
    refuses("is not among the model's", windows, np.full(30, 96, np.int32), config, 60, "text", b"")


IDS = np.random.default_rng(0).integers(3, 96, 700).tolist()


def test_against_loops_over_tokens():
    model = random_model("gqa")
    config, params = model.config, model.params["layers"][0]
    rng = np.random.default_rng(1)
    count, length = 330, 340
    q, guess, k, v = (
        jnp.asarray(rng.normal(size=(1, length, heads, config.head_dim)).astype(np.float32))
        for heads in (config.num_heads, config.num_heads, config.num_kv_heads, config.num_kv_heads)
    )
    valid = jnp.arange(length)[None] < count
    hidden = jnp.asarray(rng.normal(size=(1, length, config.hidden_size)).astype(np.float32))
    guesses = guess, 200 * guess
    found = loss.squared_errors(config, params, hidden, q, guesses, k, v, valid)
    whole, errors = (np.asarray(x)[0] for x in found)

    layer, square = blueprint(config, jnp.float32).layer(params), 0.0
    budgets = [loss.BUDGETS.index(budget) for budget in (loss.BUDGET, 0.2)]
    error = np.zeros(len(budgets))
    for i in range(loss.STEPS):
        at = count - 1 - i * (count // 2) // loss.STEPS
        both = []
        few = [int(np.float32(at) * np.float32(loss.BUDGETS[b])) for b in budgets]
        for rows in (length, *few):
            heads = []
            for kv in range(config.num_kv_heads):
                group = range(kv * config.group_size, (kv + 1) * config.group_size)
                heads += [
                    _group(np.asarray(q[0]), np.asarray(k[0, :, kv]), np.asarray(v[0, :, kv]),
                           group, h, at, rows)
                    for h in group
                ]  # fmt: skip
            a = layer.attention_input(hidden[0, at])
            both.append(np.asarray(layer.attention_output(jnp.asarray(heads, jnp.float32), a)))
        square += np.sum((np.asarray(hidden)[0, at] + both[0]) ** 2)
        error += [np.sum((one - both[0]) ** 2) for one in both[1:]]
    np.testing.assert_allclose(whole, square, rtol=2e-3)
    np.testing.assert_allclose(errors[0, budgets], error, rtol=2e-3)
    for guessed in errors[1:]:  # by a guess that knows nothing of the query, however sharp
        assert np.all(guessed > 2 * errors[0]) and np.all(np.diff(guessed) < 0)


def _group(q, k, v, group, head: int, at: int, count: int) -> np.ndarray:
    """Return a head's attention: rows chosen for its group exactly, block means of the others."""
    far = np.array([t for t in range(loss.SINKS, at + 1) if at - t >= loss.RECENT])
    total = np.zeros(len(far))
    for h in group:
        score = np.exp(k[far] @ q[at, h] - np.max(k[far] @ q[at, h]))
        total += score / score.sum()
    chosen = set(far[np.argsort(-total, kind="stable")[:count]].tolist())
    weight = np.exp(k[: at + 1] @ q[at, head] - np.max(k[: at + 1] @ q[at, head]))
    weight /= weight.sum()
    near = [t for t in range(at + 1) if t not in far or t in chosen]
    o = weight[near] @ v[near]
    for block in set((far // loss.BLOCK).tolist()):
        inside = far[far // loss.BLOCK == block]
        rest = sum(weight[t] for t in inside if t not in chosen)
        o = o + rest * v[inside].mean(axis=0)
    return o


def test_what_cannot_be_told_is_not_measured():
    model = random_model("gqa")
    text = windows(np.asarray(IDS[:200], np.int32), model.config, 200, "text", b"")
    calibrator = Calibrator(model.config, text, model.params["embedding"], speculate_from="input")
    calibrator.layer(model.params["layers"][0])
    assert np.isnan(calibrator.loss(model.params["layers"][0])).all()


@pytest.mark.parametrize("skew", ["svd", "balanced"])
def test_a_conversion_measures_every_layer(tmp_path, skew):
    made = make_tiny(tmp_path / "source", "llama", max_position_embeddings=512)
    model = checkpoint.load(convert(made.folder, tmp_path / "out", calibration=IDS, skew=skew))
    assert model.sparse_loss.shape == (model.config.num_layers, 2)
    assert np.all((model.sparse_loss > 0) & (model.sparse_loss < 1))
    own, ahead = model.sparse_loss.T
    np.testing.assert_allclose(own[0], ahead[0], rtol=1e-5)  # layer 0 is guessed from its own input
    assert np.all(own <= ahead + 1e-3)
    at = loss.BUDGETS.index(loss.BUDGET)
    same = slice(None) if skew == "svd" else slice(1)  # the other is of the layer's input
    np.testing.assert_array_equal(model.row_loss[:, same, at], model.sparse_loss[:, same])
    assert np.array_equal(model.row_loss[1:, 1, at], ahead[1:]) == (skew == "svd")
    curves = model.curves(ahead=True)
    assert curves.shares == loss.BUDGETS and len(curves.errors) == model.config.num_layers
    assert np.all(model.row_loss[:, 0, -1] <= model.row_loss[:, 0, 0])


def with_loss(own: list[float], ahead: list[float]) -> checkpoint.Model:
    model = random_model("three")
    loss = np.stack([own, ahead], axis=1).astype(np.float32)
    return dataclasses.replace(model, sparse_loss=loss)


def test_the_layers_up_to_the_last_that_loses_much_stay_on_the_device():
    assert with_loss([0.02, 0.06, 0.0], [0.02, 0.06, 0.04]).dense_layers(ahead=False) == 2
    assert with_loss([0.02, 0.06, 0.0], [0.02, 0.06, 0.04]).dense_layers(ahead=True) == 3
    assert with_loss([0.02, 0.02, 0.02], [0.02, 0.02, 0.02]).dense_layers(ahead=True) == 0
    sliding = with_loss([0.02, 0.06, 0.0], [0.02, 0.06, 0.0])  # layer 1 attends to all of its rows
    assert with_config(sliding, sliding_window=8, sliding_layers=(1,)).dense_layers(False) == 0
    late = [0.0] * checkpoint.DENSE_AMONG + [0.5]
    assert with_loss(late, late).dense_layers(ahead=True) == 0
    assert random_model("three").dense_layers(ahead=True) == checkpoint.DENSE_UNKNOWN
    unknown = [0.0, float("nan"), 0.0]
    assert with_loss(unknown, unknown).dense_layers(ahead=True) == checkpoint.DENSE_UNKNOWN


def test_the_engine_asks_the_model_for_infinigen_only():
    model = with_loss([0.2, 0.0, 0.0], [0.0, 0.0, 0.0])
    assert Engine(model).decoder.dense_layers == 1
    assert Engine(model, dense_layers=2).decoder.dense_layers == 2
    assert Engine(model, policy=Quest()).decoder.dense_layers == 2
    assert Engine(model, policy=InfiniGenPaper()).decoder.dense_layers == 0
