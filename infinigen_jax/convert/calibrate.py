"""Calibration: run a text through the model, one layer at a time, and collect q and k moments.

Only the hidden states of the text and one layer's weights are in memory. All arithmetic is
float32 with full-precision products, whatever the checkpoint's dtype.
"""

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.errors import InputError
from infinigen_jax.models import ModelConfig, Params, blueprint
from infinigen_jax.models.forward import causal_attention
from infinigen_jax.skew import Moments
from infinigen_jax.tokenization import load_tokenizer

DEFAULT_TEXT = Path(__file__).parent / "calibration.txt"
DEFAULT_TOKENS = 2048
CHARACTERS_PER_TOKEN = 64  # enough of a long text to fill the tokens asked for


class CalibrationTokens(NamedTuple):
    """Token ids in windows of equal length; `valid` is False on the padding of the last one."""

    ids: Int[np.ndarray, "w s"]
    valid: Bool[np.ndarray, "w s"]
    sha256: str

    @property
    def count(self) -> int:
        return int(self.valid.sum())


def read_text(path: Path, folder: Path, config: ModelConfig, limit: int) -> CalibrationTokens:
    """Tokenise a calibration text with the model's own tokenizer.

    Args:
        path: UTF-8 text; its beginning is used.
        folder: the model folder, for the tokenizer.
        limit: most tokens to use.

    Raises:
        InputError: when the text cannot be read or has fewer tokens than the head size.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(limit * CHARACTERS_PER_TOKEN)
    except FileNotFoundError:
        raise InputError(f"{path}: no such calibration text") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: the calibration text is not UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    ids = load_tokenizer(folder)(text, verbose=False)["input_ids"]
    return windows(np.asarray(ids, np.int32), config, limit, str(path), text.encode())


def windows(
    ids: Int[np.ndarray, " n"], config: ModelConfig, limit: int, name: str, source: bytes
) -> CalibrationTokens:
    """Cut token ids into windows that fit the model's positions, equal but for padding.

    If the text starts with the beginning-of-sequence token, every window does.
    """
    ids = ids[:limit]
    if len(ids) < config.head_dim:
        raise InputError(
            f"{name}: the calibration text has {len(ids)} tokens, but a head size of "
            f"{config.head_dim} needs at least {config.head_dim}: give a longer text"
        )
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise InputError(
            f"{name}: token {int(ids.max())} is outside the vocabulary of {config.vocab_size}; "
            "the tokenizer belongs to another model"
        )
    prefix = ids[:1] if ids[0] == config.bos_id and config.max_positions > 1 else ids[:0]
    body = ids[len(prefix) :]
    room = config.max_positions - len(prefix)
    number = max(1, -(-len(body) // room))
    body = body[: limit - number * len(prefix)]
    length = -(-len(body) // number)
    padded = np.pad(body, (0, number * length - len(body))).reshape(number, length)
    valid = (np.arange(number * length) < len(body)).reshape(number, length)
    first = np.tile(prefix, (number, 1))
    return CalibrationTokens(
        np.concatenate([first, padded], axis=1).astype(np.int32),
        np.concatenate([np.ones(first.shape, bool), valid], axis=1),
        hashlib.sha256(source).hexdigest(),
    )


class Calibrator:
    """Carries the text's hidden states from layer to layer.

    Args:
        config: the architecture.
        tokens: the text.
        embedding: the embedding's parameters, float32.
    """

    def __init__(self, config: ModelConfig, tokens: CalibrationTokens, embedding: Params):
        self._config = config
        self._count = tokens.count
        self._valid = jnp.asarray(tokens.valid)
        plan = blueprint(config, jnp.float32)
        positions = jnp.broadcast_to(jnp.arange(tokens.ids.shape[1]), tokens.ids.shape)
        self._hidden = plan.embedding(embedding).embed(jnp.asarray(tokens.ids), positions)

    def layer(self, params: Params) -> Moments:
        """Run the next layer with these float32 parameters; its query and key moments."""
        with jax.default_matmul_precision("highest"):  # GPUs would round products to TF32
            self._hidden, sums = _step(self._config)(params, self._hidden, self._valid)
        # Summed over windows in float64, on the host.
        query_gram, key_gram, key_sum = (np.asarray(s, np.float64).sum(axis=0) for s in sums)
        if not np.isfinite(query_gram).all() or not np.isfinite(key_gram).all():
            raise InputError("the weights give queries or keys that are not finite; get them again")
        return Moments(self._count, self._config.group_size, query_gram, key_gram, key_sum)


Sums = tuple[Float[Array, "w k d d"], Float[Array, "w k d d"], Float[Array, "w k d"]]


@functools.cache
def _step(config: ModelConfig) -> Callable[..., Any]:
    """One layer over all windows; compiled once, it serves every layer."""
    plan = blueprint(config, jnp.float32)

    def window(params: Params, x: Array, valid: Array) -> tuple[Array, Any]:
        layer = plan.layer(params)
        positions = jnp.arange(x.shape[0])
        a = layer.attention_input(x)
        queries, (keys, values) = layer.query(a, positions), layer.key_value(a, positions)
        real = valid.astype(x.dtype)[:, None, None]
        q, k = queries * real, keys * real
        q = q.reshape(-1, config.num_kv_heads, config.group_size, config.head_dim)
        sums = (
            jnp.einsum("skgd,skge->kde", q, q),
            jnp.einsum("skd,ske->kde", k, k),
            k.sum(axis=0),
        )
        x = x + layer.attention_output(causal_attention(queries, keys, values))
        return x + layer.mlp(x), sums

    def step(params: Params, x: Float[Array, "w s e"], valid: Bool[Array, "w s"]) -> Any:
        return jax.lax.map(lambda pair: window(params, *pair), (x, valid))

    return jax.jit(step, donate_argnums=1)
