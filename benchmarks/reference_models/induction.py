"""A start that can look up: heads that copy what stood behind the same token before.

Two heads in a row make such a lookup (induction; Olsson et al., 2022): one writes to every position
which token stands before it, the next compares the token at hand with that and copies the token
found. Models learn it by themselves after billions of tokens, small ones on a CPU never get there.
So they start with it, roughly, as others start with attention that looks like a trained one's
(Trockman and Kolter, 2023): random directions carry the tokens, and training makes of it what it
needs. It is a start for training, no more: without the runs of random tokens that come first
(`Synthetic.copies`) it is lost within a hundred steps.

    layer 0, first KV head     looks one token back and (second query head) two, by position alone,
                               and writes what is there to directions that no embedding uses
    layers 1 to 3, first one   match tokens with those, and copy
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.models import ModelConfig, Params

EMBEDDING = 0.1  # standard deviation of an embedding's entries
CONSTANT = 0.5  # share of a rotary model's normalised embedding that is the same for all tokens
QUIET = 0.1  # of what all layers write at first, so that it does not drown the embedding
SHARPNESS = 12.0  # logits between the position looked for and those beside it, about, times two
MATCH = 2.0  # of the logit of a direction that agrees
WRITTEN = 3.0  # of what is written about earlier tokens, in units of the embedding
COPIED = 2.0  # of what is copied
COPIERS = (1, 2, 3)

Look = Callable[[int], np.ndarray]  # projections [d, head size] that look so many positions back


def with_induction(params: Params, config: ModelConfig, seed: int) -> Params:
    """Parameters (float32) with the heads described above in place of some of the random ones."""
    c = config
    rng = np.random.default_rng([seed, 1])
    d = c.hidden_size
    directions = np.linalg.qr(rng.normal(size=(d, d)))[0]
    n = min(c.head_dim, (d - 1) // 5)
    constant, directions = directions[:, 0], directions[:, 1:]
    token, once, twice, output = (directions[:, i * n : (i + 1) * n] for i in range(4))
    made = jax.tree.map(np.array, params)
    assert c.rope is not None
    _quieten(made, once, twice)
    made["embedding"]["tokens"]["embedding"] += EMBEDDING * np.sqrt(d) * CONSTANT * constant
    fast = c.head_dim // 4  # pairs that turn fast enough to tell neighbours apart
    angles = np.asarray(c.rope.frequencies(c.head_dim))[:fast]
    looks = _by_rotation(constant, angles, c.scale, c.head_dim)
    _look_back(_Heads(made["layers"][0], config), looks, token, (once, twice))
    for order, number in enumerate(i for i in COPIERS if i < c.num_layers):
        heads = _Heads(made["layers"][number], config)
        _copy(heads, config, order, token, once, twice, output)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), made)


def _look_back(heads: "_Heads", looks: Look, token: np.ndarray, written: Any) -> None:
    """The first KV head's query heads write which token is one and two back, by position alone."""
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
    """The first KV head's query heads copy what stood behind the token at hand.

    Args:
        order: which of the layers that do it; each compares by directions of its own.
    """
    size, n = config.head_dim, token.shape[1]
    # Slow pairs alone: a lookup must not depend on the distance.
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
    """A layer's projections by head, as views."""

    def __init__(self, layer: Params, config: ModelConfig):
        c = config
        both = layer["kv"]["kernel"].reshape(c.hidden_size, 2 * c.num_kv_heads, c.head_dim)
        self.key, self.value = both[:, : c.num_kv_heads], both[:, c.num_kv_heads :]
        self.query = layer["q"]["kernel"].reshape(c.hidden_size, c.num_heads, c.head_dim)
        self.group = c.group_size
        self.output = layer["o"]["kernel"].reshape(c.num_heads, c.head_dim, c.hidden_size)


def _quieten(params: Params, *unused: np.ndarray) -> None:
    """Larger embeddings that leave some directions alone, and layers that write little."""
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
    """For rotary positions, of what all tokens have in common."""
    strength = np.sqrt(SHARPNESS / scale) / (CONSTANT * np.sqrt(len(constant)))
    fast, half = len(angles), size // 2

    def look(back: int) -> np.ndarray:
        head = np.zeros(size)
        head[:fast] = np.cos(back * angles)
        head[half : half + fast] = -np.sin(back * angles)
        return strength * np.outer(constant, head)

    return look
