"""Calibration: which tokens it sees, and that its bases are those of a model's queries and keys."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from tiny import LLAMA, refuses

from infinigen_jax.convert.calibrate import Calibrator, windows
from infinigen_jax.convert.pipeline import convert
from infinigen_jax.loading import load as checkpoint
from infinigen_jax.models import blueprint, config_from_hf, random_params
from infinigen_jax.skew.basis import moments

GQA = config_from_hf(
    LLAMA | {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
)


def test_absorbed_bases_diagonalise_queries(tiny, tmp_path):
    """`test_convert.py` compares the logits."""
    reference = tiny("opt", hidden_size=64, word_embed_proj_dim=64, num_hidden_layers=1)
    ids = [int(i) for i in np.random.default_rng(1).integers(3, 96, 150)]
    convert(reference.folder, tmp_path / "out", calibration=ids, skew="svd")
    model = checkpoint.load(tmp_path / "out", "float32")
    assert model.bases == (None,) and model.skew == "svd"
    first = blueprint(model.config, jnp.float32)
    grams = []
    for start in (0, 64, 128):  # the three windows that 150 tokens make of 64 positions
        part = jnp.asarray(ids[start : start + 64])
        positions = jnp.arange(len(part))
        x = first.embedding(model.params["embedding"]).embed(part, positions)
        layer = first.layer(model.params["layers"][0])
        q = np.asarray(layer.query(layer.attention_input(x), positions), np.float64)
        grams.append(np.einsum("thd,the->hde", q, q))
    gram = sum(grams)
    diagonal = np.einsum("hdd->hd", gram)
    off = np.abs(gram - diagonal[:, :, None] * np.eye(16))
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
    architecture = blueprint(config, jnp.float32)
    layer = architecture.layer(params["layers"][0])
    pieces = []
    for start in (0, 20, 40):
        part = jnp.asarray(ids[start : start + 20])
        positions = jnp.arange(len(part))
        a = layer.attention_input(
            architecture.embedding(params["embedding"]).embed(part, positions)
        )
        pieces.append((layer.query(a, positions), layer.key_value(a, positions)[0]))
    expected = moments(*map(jnp.concatenate, zip(*pieces, strict=True)))
    assert seen.tokens == expected.tokens == 56
    np.testing.assert_allclose(seen.query_gram, expected.query_gram, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen.key_gram, expected.key_gram, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(seen.key_sum, expected.key_sum, rtol=1e-4, atol=1e-4)


def test_windows_start_with_the_beginning_of_sequence_token_and_respect_the_limit():
    config = dataclasses.replace(GQA, max_positions=20, bos_id=0)
    ids = np.concatenate([[0], np.arange(3, 90)]).astype(np.int32)
    cut = windows(ids, config, 60, "text", b"")
    assert cut.count <= 60 and cut.ids.shape[1] <= 20
    assert np.all(cut.ids[:, 0] == 0) and not np.any(cut.ids[:, 1:][cut.valid[:, 1:]] == 0)
    refuses("11 tokens", windows, ids[:11], config, 60, "text", b"")
    refuses("is not among the model's", windows, np.full(30, 96, np.int32), config, 60, "text", b"")
