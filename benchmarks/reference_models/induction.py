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


def with_induction(params: Params, config: ModelConfig, seed: int) -> Params:
    """Parameters (float32) with the heads described above in place of some of the random ones."""
    c = config
    rng = np.random.default_rng([seed, 1])
    d, size, group = c.hidden_size, c.head_dim, c.group_size
    directions = np.linalg.qr(rng.normal(size=(d, d)))[0]
    n = min(size, (d - 1) // 5)
    constant, directions = directions[:, 0], directions[:, 1:]
    token, once, twice, output, place = (directions[:, i * n : (i + 1) * n] for i in range(5))
    made = jax.tree.map(np.array, params)
    _quieten(made, once, twice, *([place] if c.rope is None else []))
    embedding = made["embedding"]["tokens"]["embedding"]
    if c.rope is None:
        positions = made["embedding"]["positions"]["embedding"]
        waves = _waves(n, len(positions))
        positions[:] = EMBEDDING * np.sqrt(2) * waves @ place.T
        seen = np.sqrt(d / (d - 2 * n))  # of a coordinate behind the normalisation, about
        looks = _by_place(place, c.scale, seen, size)
        first_matched = 0
    else:
        embedding += EMBEDDING * np.sqrt(d) * CONSTANT * constant
        fast = size // 4  # pairs that turn fast enough to tell neighbours apart
        angles = np.asarray(c.rope.frequencies(size))[:fast]
        looks = _by_rotation(constant, angles, c.scale, size)
        first_matched = fast
    first = _Heads(made["layers"][0], config)
    first.key[:, 0] = looks(0)
    first.value[:, 0] = 0
    first.value[:, 0, :n] = token
    for i, written in zip(range(min(group, 2)), (once, twice), strict=False):
        first.query[:, i] = looks(i + 1)
        first.output[i] = 0
        first.output[i, :n] = written.T * EMBEDDING * WRITTEN
    strength = np.sqrt(MATCH / c.scale) if c.rope else np.sqrt(MATCH / c.scale / 2)
    half = size // 2
    for order, number in enumerate(i for i in COPIERS if i < c.num_layers):
        heads = _Heads(made["layers"][number], config)
        heads.value[:, 0], heads.key[:, 0] = 0, 0
        heads.value[:, 0, :n] = output
        if c.rope is None:
            read = slice(0, n)
            pairs = [(slice(0, n), once, token)]
        else:  # slow pairs alone: a lookup must not depend on the distance
            width = half - first_matched
            start = order * width % max(n - width, 1)
            read = slice(start, start + min(width, n))
            width = read.stop - read.start
            low, high = first_matched, half + first_matched
            pairs = [
                (slice(low, low + width), once, token),
                (slice(high, high + width), twice, once),
            ]
        for i in range(group):
            heads.query[:, i], heads.output[i] = 0, 0
            heads.output[i, :n] = output.T * EMBEDDING * COPIED
        for columns, kept, asked in pairs:
            heads.key[:, 0, columns] = kept[:, read] * strength
            heads.query[:, :group, columns] = (asked[:, read] * strength)[:, None]
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), made)


class _Heads:
    """A layer's projections by head, as views."""

    def __init__(self, layer: Params, config: ModelConfig):
        c = config
        both = layer["kv"]["kernel"].reshape(c.hidden_size, 2 * c.num_kv_heads, c.head_dim)
        self.key, self.value = both[:, : c.num_kv_heads], both[:, c.num_kv_heads :]
        self.query = layer["q"]["kernel"].reshape(c.hidden_size, c.num_heads, c.head_dim)
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


def _waves(n: int, positions: int) -> np.ndarray:
    """[positions, n]: cosines, then sines, of n // 2 frequencies."""
    angles = np.arange(positions)[:, None] * _frequencies(n)[None]
    waves = np.zeros((positions, n))
    waves[:, : n // 2], waves[:, n // 2 : n // 2 * 2] = np.cos(angles), np.sin(angles)
    return waves


def _frequencies(n: int) -> np.ndarray:
    return 1000.0 ** (-np.arange(n // 2) / max(n // 2, 1))


def _by_place(place: np.ndarray, scale: float, seen: float, size: int):
    """Projections [d, size] that look so many positions back, of learned positions as waves."""
    n = place.shape[1]
    half = n // 2
    strength = np.sqrt(SHARPNESS / scale / 4) / seen

    def look(back: int) -> np.ndarray:
        turn = back * _frequencies(n)
        cos, sin = place[:, :half], place[:, half : 2 * half]
        projection = np.zeros((len(place), size))
        projection[:, :half] = cos * np.cos(turn) + sin * np.sin(turn)
        projection[:, half : 2 * half] = sin * np.cos(turn) - cos * np.sin(turn)
        return strength * projection

    return look


def _by_rotation(constant: np.ndarray, angles: np.ndarray, scale: float, size: int):
    """Projections [d, size] that look so many positions back, of what all tokens have in common."""
    strength = np.sqrt(SHARPNESS / scale) / (CONSTANT * np.sqrt(len(constant)))
    fast, half = len(angles), size // 2

    def look(back: int) -> np.ndarray:
        head = np.zeros(size)
        head[:fast] = np.cos(back * angles)
        head[half : half + fast] = -np.sin(back * angles)
        return strength * np.outer(constant, head)

    return look
