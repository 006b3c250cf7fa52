"""Random models of published shapes, with peaked attention, for measurements of speed.

Plain random weights attend evenly: a selection by distance from the best score would take nearly
every token, and consecutive tokens would select different rows. In trained models few directions of
queries and keys carry most of a score, and few tokens hold most of the weight. These tokens mostly
stay the same from step to step, because a few outlier channels give all queries a common part.
`peaked_model` plants only these properties; the text it writes and the accuracy of its speculation
are meaningless. Its query is corrected as by a default conversion, so a step costs the same as with
a real model.
"""

import argparse
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.checkpoint.manifest import DEFAULT_SOURCE
from infinigen_jax.checkpoint.skew_file import Ahead
from infinigen_jax.convert.calibrate import CalibrationTokens, Calibrator
from infinigen_jax.convert.loss import BUDGET, BUDGETS
from infinigen_jax.errors import InputError
from infinigen_jax.loading.load import Basis, Model, load
from infinigen_jax.models import ModelConfig, Params, blueprint, config_from_hf
from infinigen_jax.models.linear import in_full
from infinigen_jax.skew.basis import svd_basis
from infinigen_jax.text.tokenizer import Tokenizer

# Deviation of attention logits over tokens; plain random weights have 1. With 3.0 about 4 % of 2048
# tokens are within 4 of the best one; the paper fetches 3.6 % there.
SCORE_DEVIATION = 3.0
DECAY = 7.0  # the first column of a head has e^7 times the energy of the last
OUTLIERS = 4  # channels with the same value for every token
COMMON = 0.75  # their share of a query; gives hit rates like those of real models
CALIBRATION = (2, 512)  # windows, and tokens per window


def settings(shape: dict[str, Any], positions: int) -> dict[str, Any]:
    """Return `config.json` of a shape for a context of `positions` tokens. No token ends a text."""
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return shape | ends | {"max_position_embeddings": positions}


def llama(hidden: int, layers: int, heads: int, kv: int, mlp: int, vocab: int) -> dict[str, Any]:
    """Return the `config.json` of a LLaMA model, without the number of positions."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": hidden // heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
    }


def opt(hidden: int, layers: int, heads: int, mlp: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": mlp,
        "vocab_size": vocab,
        "activation_function": "relu",
        "dropout": 0.0,
        # Real models are tied. A random tied model repeats one token and fetches nothing new.
        "tie_word_embeddings": False,
    }


SHAPES = {
    "llama": llama(512, 8, 8, 8, 1376, 4096),
    "opt": opt(512, 8, 8, 2048, 4096),
    "toy": llama(64, 3, 4, 2, 96, 128),
    "toy-opt": opt(64, 3, 4, 96, 128),
    "opt-13b": opt(5120, 40, 40, 20480, 50272),
    "llama-8b": llama(4096, 32, 32, 8, 14336, 128256),
}


def peaked_model(shape: dict[str, Any], positions: int, dtype: str) -> Model:
    """Make a random model with peaked attention, skewed by calibration on random tokens.

    - The columns of each head's queries and keys decay geometrically, scaled so that attention
      logits have the standard deviation SCORE_DEVIATION. With rotation, the slowest pairs have the
      most energy, as in trained models; otherwise a key's scores would change with every step.
    - The first OUTLIERS channels of the hidden states make up COMMON of the queries; nothing else
      reads them.
    - Layers change the residual stream little, as trained ones do; otherwise the next layer's
      queries could not be speculated.

    It is made layer by layer, so memory never holds a second copy.
    """
    config = config_from_hf(settings(shape, positions))
    architecture = blueprint(config, dtype)
    keys = jax.random.split(jax.random.key(0), config.num_layers + 1)
    make_layer, make_embedding = (
        jax.jit(functools.partial(_parameters, config, shapes))
        for shapes in (architecture.layer_shapes, architecture.embedding_shapes)
    )
    layers = [make_layer(key) for key in keys[1:]]
    params = {"embedding": make_embedding(keys[0]), "layers": layers}
    bases, losses, blocks = _calibrated(config, params)
    zeros = jnp.zeros(config.query_width, dtype)
    projections = [
        {"weight": np.asarray(q["weight"]), "bias": np.asarray(q.get("bias", zeros))}
        for q in (layer["q"] for layer in layers)
    ]
    model = Model.from_params(config, params, dtype, bases=bases, skew="svd")
    return dataclasses.replace(
        model,
        sparse_loss=losses[:, :, BUDGETS.index(BUDGET)],
        tail_moments=blocks,
        ahead=tuple(map(Ahead, projections, bases)),
        speculate_from=DEFAULT_SOURCE,
    )


def model_of(options: argparse.Namespace, positions: int) -> tuple[Model, dict[str, Any]]:
    """Return the model `options.model`, or a random one, and the contents of its `config.json`."""
    if options.model:
        model = load(options.model, dtype=options.dtype)
        assert model.path is not None
        return model, json.loads((model.path / "config.json").read_text())
    shape = SHAPES[options.shape]
    return peaked_model(shape, positions, options.dtype), settings(shape, positions)


def with_plain_matrices(model: Model) -> Model:
    """Return a model with plain matrices, in its dtype, in place of small weights."""

    def in_plain(tree: Params, config: ModelConfig) -> Params:
        inputs = {"o": config.query_width, "down": config.intermediate_size}

        def plain(name: str, part: Params) -> Params:
            whole = in_full(part, inputs.get(name, config.hidden_size), model.dtype)
            return {"embedding": whole["weight"]} if name == "tokens" and "codes" in part else whole

        return {name: plain(name, part) for name, part in tree.items()}

    embedding = in_plain(model.params["embedding"], model.config)
    numbered = enumerate(model.params["layers"])
    layers = [in_plain(layer, model.config.of(i)) for i, layer in numbered]
    return dataclasses.replace(model, params={"embedding": embedding, "layers": layers})


def prompt(config: ModelConfig, tokens: int, seed: int = 1) -> list[int]:
    """Return random token ids."""
    return np.random.default_rng(seed).integers(0, config.vocab_size, tokens).tolist()


def prompts(model: Model, tokens: int, batch: int, text: Path | None) -> list[list[int]]:
    """Return prompts of equal lengths: parts of the text, or random ones for a random model."""
    if text is None or model.path is None:
        return [prompt(model.config, tokens, 1 + i) for i in range(batch)]
    ids = text_tokens(model.tokenizer, text, tokens * batch)
    return [ids[i : i + tokens] for i in range(0, len(ids), tokens)]


def text_tokens(tokenizer: Tokenizer, text: Path, count: int) -> list[int]:
    """Return the first `count` tokens of a text; raise InputError if it is shorter."""
    with text.open(encoding="utf-8") as file:
        ids = tokenizer.encode(file.read(16 * count))
    if len(ids) < count:
        raise InputError(f"{text}: {len(ids)} tokens; give a longer text")
    return ids[:count]


def _parameters(config: ModelConfig, shapes: Params, key: jax.Array) -> Params:
    places, tree = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(key, len(places))
    leaves = [_fill(config, path, leaf, keys[i]) for i, (path, leaf) in enumerate(places)]
    return jax.tree.unflatten(tree, leaves)


def _fill(config: ModelConfig, path: Any, leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    module, name = path[-2].key, path[-1].key
    if name == "scale":
        return jnp.ones(leaf.shape, leaf.dtype)
    if name == "bias":
        return jnp.zeros(leaf.shape, leaf.dtype)
    if name == "embedding":
        x = jax.random.normal(key, leaf.shape, jnp.float32)
        x *= 1.0 if module == "tokens" else 0.1
        if module == "tokens":
            size = (COMMON / (1 - COMMON) * config.hidden_size / OUTLIERS) ** 0.5
            planted = np.full(OUTLIERS, size, np.float32)
            planted[1::2] *= -1  # zero mean, so LayerNorm does not subtract them
            x = x.at[:, :OUTLIERS].set(planted[None])
        return x.astype(leaf.dtype)
    x = jax.random.normal(key, leaf.shape[::-1], jnp.float32) * leaf.shape[-1] ** -0.5
    if module == "q":
        x *= jnp.tile(_profile(config), config.num_heads)[None]
    elif module in ("o", "down"):
        # Each layer adds two terms; together they add about as much as the embedding holds.
        x *= (2 * config.num_layers) ** -0.5
    else:  # reads the hidden state without the outliers, scaled as if the norm excluded them
        x = x.at[:OUTLIERS].set(0.0) * (1 - COMMON) ** -0.5
    if module == "kv":
        columns = jnp.tile(_profile(config), config.num_kv_heads)
        x *= jnp.concatenate([columns, jnp.ones_like(columns)])[None]
    return x.T.astype(leaf.dtype)


def _profile(config: ModelConfig) -> jax.Array:
    """Return the factors of a head's d columns, for queries and keys."""
    d = config.head_dim
    place = jnp.arange(d)
    if config.rope is not None:  # columns j and j + d/2 rotate together; the last rotate slowest
        place = (d // 2 - 1 - place % (d // 2)) * 2
    energy = jnp.exp(-DECAY / d * place.astype(jnp.float32))
    # The variance of a query-key product is sum(energy^2) / d, where energy is the factor squared.
    return jnp.sqrt(energy * SCORE_DEVIATION * jnp.sqrt(d / jnp.sum(energy**2)))


def _calibrated(
    config: ModelConfig, params: Params
) -> tuple[tuple[Basis, ...], np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Calibrate on random tokens; return bases (section 4.2), losses and tail moments."""
    windows, length = CALIBRATION
    shape, rng = (windows, min(length, config.max_positions)), np.random.default_rng(1)
    ids = rng.integers(0, config.vocab_size, shape).astype(np.int32)
    tokens = CalibrationTokens(ids, np.ones(ids.shape, bool), "")
    plain = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    calibrator = Calibrator(config, tokens, plain(params["embedding"]), speculate_from="input")
    bases, losses, blocks = [], [], []
    for layer in map(plain, params["layers"]):
        moments = calibrator.extend_to_all_positions(calibrator.layer(layer), layer)
        matrix = jnp.asarray(svd_basis(moments)[0], jnp.float32)
        bases.append(Basis(matrix, matrix))
        losses.append(calibrator.loss(layer))
        blocks.append(calibrator.extend_to_all_positions(calibrator.blocks, layer))
    keys, values = (np.stack(each).astype(np.float32) for each in zip(*blocks, strict=True))
    return tuple(bases), np.stack(losses), (keys, values)
