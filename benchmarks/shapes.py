"""Models to measure with: random weights in published shapes, with attention that is peaked.

Plain random weights attend evenly, and a selection by distance from the best score would take
nearly every token. Trained models do not: a few directions of queries and keys carry most of a
score, and few tokens hold most of the weight. `peaked_model` gives random weights these two
properties, no more; what text a model writes, and how well speculation guesses, is not its matter.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.checkpoint import Basis, Model
from infinigen_jax.convert.calibrate import CalibrationTokens, Calibrator
from infinigen_jax.models import ModelConfig, Params, config_from_hf, random_params
from infinigen_jax.skew import svd_basis

SCORE_DEVIATION = 4.0  # of attention logits over tokens; 1 with plain random weights
DECAY = 7.0  # the first column of a head has e^7 times the energy of the last
CALIBRATION = (8, 128)  # windows, tokens of each


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's `config.json`, without the number of positions."""

    name: str
    hf: dict[str, Any]

    def settings(self, positions: int) -> dict[str, Any]:
        """The whole `config.json`, for a context of so many tokens. No token ends a text."""
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return self.hf | ends | {"max_position_embeddings": positions}


def llama(name: str, hidden: int, layers: int, heads: int, kv: int, mlp: int, vocab: int) -> Shape:
    return Shape(
        name,
        {
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
        },
    )


def opt(name: str, hidden: int, layers: int, heads: int, mlp: int, vocab: int) -> Shape:
    return Shape(
        name,
        {
            "model_type": "opt",
            "hidden_size": hidden,
            "word_embed_proj_dim": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "ffn_dim": mlp,
            "vocab_size": vocab,
            "activation_function": "relu",
            "dropout": 0.0,
            "tie_word_embeddings": True,
        },
    )


SHAPES = {
    shape.name: shape
    for shape in (
        llama("llama", 512, 8, 8, 8, 1376, 4096),
        opt("opt", 512, 8, 8, 2048, 4096),
        llama("toy", 64, 3, 4, 2, 96, 128),
        opt("opt-13b", 5120, 40, 40, 20480, 50272),
        llama("llama-8b", 4096, 32, 32, 8, 14336, 128256),
    )
}


def peaked_model(shape: Shape, positions: int, dtype: str, seed: int = 0) -> Model:
    """A random model with peaked attention, skewed with calibration on random tokens.

    The columns of each head's queries and keys fall off geometrically (pairs of columns alike where
    they are rotated together), scaled so that attention logits have the standard deviation
    SCORE_DEVIATION. Layers change the residual stream little, as trained ones do, or the next
    layer's queries could not be guessed.
    """
    config = config_from_hf(shape.settings(positions))
    params = random_params(config, dtype, seed)
    profile = _profile(config)
    # Each layer adds two terms; together the layers add about as much as the embedding holds.
    damping = (2 * config.num_layers) ** -0.5

    def reshape_weights(path: Any, leaf: jax.Array) -> jax.Array:
        module, name = path[-2].key, path[-1].key
        if name == "embedding":
            factor = jnp.asarray(50.0 if module == "tokens" else 5.0)  # deviations 1 and 0.1
        elif name != "kernel":
            return leaf
        elif module == "q":
            factor = jnp.tile(profile, config.num_heads)[None]
        elif module == "kv":
            keys = jnp.tile(profile, config.num_kv_heads)
            factor = jnp.concatenate([keys, jnp.ones_like(keys)])[None]
        else:
            factor = jnp.asarray(damping if module in ("o", "down") else 1.0)
        return leaf * factor.astype(leaf.dtype)

    params = jax.tree_util.tree_map_with_path(reshape_weights, params)
    model = Model.from_params(config, params, dtype)
    return dataclasses.replace(model, bases=_bases(config, params, seed), skew="svd")


def prompt(config: ModelConfig, tokens: int, seed: int = 1) -> list[int]:
    """Random token numbers."""
    return np.random.default_rng(seed).integers(0, config.vocab_size, tokens).tolist()


def _profile(config: ModelConfig) -> jax.Array:
    """Factor of each of a head's d columns, for queries and for keys."""
    d = config.head_dim
    place = jnp.arange(d) % (d // 2) * 2 if config.rope is not None else jnp.arange(d)
    energy = jnp.exp(-DECAY / d * place.astype(jnp.float32))
    # The product of a query and a key has the variance sum(energy^2) / d, energy being the square.
    return jnp.sqrt(energy * SCORE_DEVIATION * jnp.sqrt(d / jnp.sum(energy**2)))


def _bases(config: ModelConfig, params: Params, seed: int) -> tuple[Basis, ...]:
    """The paper's basis of every layer (section 4.2), from random tokens."""
    windows, length = CALIBRATION
    ids = np.random.default_rng(seed + 1).integers(0, config.vocab_size, (windows, length))
    ids = ids.astype(np.int32)
    tokens = CalibrationTokens(ids, np.ones(ids.shape, bool), "")
    plain = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)  # noqa: E731
    calibrator = Calibrator(config, tokens, plain(params["embedding"]))
    bases = []
    for layer in params["layers"]:
        matrix = jnp.asarray(svd_basis(calibrator.layer(plain(layer)))[0], jnp.float32)
        bases.append(Basis(matrix, matrix))
    return tuple(bases)
