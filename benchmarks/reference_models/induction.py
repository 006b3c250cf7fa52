"""Initial parameters with induction heads, which copy the token after an earlier equal token.

Two consecutive heads make such a lookup (induction; Olsson et al., 2022). The first writes the
previous token to every position; the second compares the current token with these and copies the
match. Models learn this after billions of tokens, small ones on a CPU never. So they start with an
approximation, like others start with attention that resembles trained attention (Trockman and
Kolter, 2023): random directions carry the tokens, and training adapts them. Without the initial
runs of random tokens (`Synthetic.copies`) the heads are lost within a hundred steps.

    layer 0, first KV head     attends one token back and (second query head) two, by position
                               alone, and writes the token to directions that no embedding uses
    layers 1 to 3, first one   match tokens with those directions, and copy
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.models import ModelConfig, Params

EMBEDDING = 0.1  # standard deviation of an embedding's entries
CONSTANT = 0.5  # constant share of a rotary model's normalised embedding
QUIET = 0.1  # initial scale of all layers' output, so that the embedding dominates
SHARPNESS = 12.0  # about twice the logit difference between adjacent positions
MATCH = 2.0  # logit of a matching direction
WRITTEN = 3.0  # scale of the written tokens, in units of the embedding
COPIED = 2.0  # scale of the copied tokens
COPIERS = (1, 2, 3)

Look = Callable[[int], np.ndarray]  # number of positions back -> projection [d, head size]


def with_induction(params: Params, config: ModelConfig, seed: int) -> Params:
    """Return float32 parameters with these heads in place of some random ones."""
    c = config
    rng = np.random.default_rng([seed, 1])
    d = c.hidden_size
    directions = np.linalg.qr(rng.normal(size=(d, d)))[0]
    n = min(c.head_dim, (d - 1) // 5)
    constant, directions = directions[:, 0], directions[:, 1:]
    token, once, twice, output = (directions[:, i * n : (i + 1) * n] for i in range(4))
    arrays = jax.tree.map(np.array, params)
    assert c.rope is not None
    _quieten(arrays, once, twice)
    arrays["embedding"]["tokens"]["embedding"] += EMBEDDING * np.sqrt(d) * CONSTANT * constant
    fast = c.head_dim // 4  # pairs that rotate fast enough to distinguish neighbours
    angles = np.asarray(c.rope.frequencies(c.head_dim))[:fast]
    looks = _by_rotation(constant, angles, c.scale, c.head_dim)
    _look_back(_Heads(arrays["layers"][0], config), looks, token, (once, twice))
    for order, layer in enumerate(i for i in COPIERS if i < c.num_layers):
        heads = _Heads(arrays["layers"][layer], config)
        _copy(heads, config, order, token, once, twice, output)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), arrays)


def _look_back(heads: "_Heads", looks: Look, token: np.ndarray, written: Any) -> None:
    """Let the first KV head write the tokens one and two back, selected by position alone."""
    n = token.shape[1]
    heads.key[:, 0], heads.value[:, 0] = looks(0), 0
    heads.value[:, 0, :n] = token
    for i in range(min(heads.group, len(written))):
        heads.query[:, i], heads.output[i] = looks(i + 1), 0
        heads.output[i, :n] = written[i].T * EMBEDDING * WRITTEN


def _copy(
    heads: "_Heads",
    config: ModelConfig,
    order: int,
    token: np.ndarray,
    once: np.ndarray,
    twice: np.ndarray,
    output: np.ndarray,
) -> None:
    """Let the first KV head copy the token after an earlier occurrence of the current token.

    Args:
        order: index among the copying layers; each compares by other directions.
    """
    size, n = config.head_dim, token.shape[1]
    # Only slow pairs: a lookup must not depend on the distance.
    strength = np.sqrt(MATCH / config.scale)
    half, low = size // 2, size // 4
    width = min(half - low, n)
    start = order * width % max(n - width, 1)
    read = slice(start, start + width)
    pairs = [
        (slice(low, low + width), once, token),
        (slice(half + low, half + low + width), twice, once),
    ]
    heads.key[:, 0], heads.value[:, 0] = 0, 0
    heads.value[:, 0, :n] = output
    heads.query[:, : heads.group], heads.output[: heads.group] = 0, 0
    heads.output[: heads.group, :n] = output.T * EMBEDDING * COPIED
    for columns, kept, asked in pairs:
        heads.key[:, 0, columns] = kept[:, read] * strength
        heads.query[:, : heads.group, columns] = (asked[:, read] * strength)[:, None]


class _Heads:
    """Views of a layer's projections by head."""

    def __init__(self, layer: Params, config: ModelConfig):
        c = config
        both = layer["kv"]["kernel"].reshape(c.hidden_size, 2 * c.num_kv_heads, c.head_dim)
        self.key, self.value = both[:, : c.num_kv_heads], both[:, c.num_kv_heads :]
        self.query = layer["q"]["kernel"].reshape(c.hidden_size, c.num_heads, c.head_dim)
        self.group = c.group_size
        self.output = layer["o"]["kernel"].reshape(c.num_heads, c.head_dim, c.hidden_size)


def _quieten(params: Params, *unused: np.ndarray) -> None:
    """Enlarge embeddings outside of the unused directions, and reduce the layers' output."""
    embedding = params["embedding"]["tokens"]["embedding"]
    embedding[:] = _without(embedding, *unused) * (EMBEDDING / 0.02)
    for layer in params["layers"]:
        for name in ("o", "down"):
            layer[name]["kernel"] *= QUIET


def _without(x: np.ndarray, *directions: np.ndarray) -> np.ndarray:
    for some in directions:
        x = x - (x @ some) @ some.T
    return x


def _by_rotation(constant: np.ndarray, angles: np.ndarray, scale: float, size: int) -> Look:
    """Return projections for rotary positions, from the constant part of all tokens."""
    strength = np.sqrt(SHARPNESS / scale) / (CONSTANT * np.sqrt(len(constant)))
    fast, half = len(angles), size // 2

    def look(back: int) -> np.ndarray:
        head = np.zeros(size)
        head[:fast] = np.cos(back * angles)
        head[half : half + fast] = -np.sin(back * angles)
        return strength * np.outer(constant, head)

    return look
