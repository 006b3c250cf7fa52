"""Calibration: run a text through the model, one layer at a time, and collect q and k moments.

Only the hidden states of the text and one layer's weights are in memory; for the correction of the
layer-ahead query also the attention inputs of two layers and the queries of one. All arithmetic is
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

from infinigen_jax.correction import Projection, corrected_projection
from infinigen_jax.errors import InputError
from infinigen_jax.models import ModelConfig, Params, blueprint
from infinigen_jax.models.forward import causal_attention
from infinigen_jax.skew import GuessMoments, Moments, guess_moments
from infinigen_jax.speculation import projected_query
from infinigen_jax.spread import offsets, spread_guess, spread_moments
from infinigen_jax.tokenization import load_tokenizer

AHEAD = ("kernel", "bias")
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
    """Cut token ids into windows of all the model's positions, the last one padded.

    Not into shorter ones of equal length: rotated queries and keys turn with the position, and a
    basis from the first positions alone loses its worth behind them (docs/quality.md); what no
    window reaches is left to `spread`. If the text starts with the beginning-of-sequence token,
    every window does.
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
    length = min(room, len(body))
    number = -(-len(body) // length)
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
        ahead: keep what `ahead` needs.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokens: CalibrationTokens,
        embedding: Params,
        ahead: bool = False,
    ):
        self._config = config
        self._count = tokens.count
        self._ahead = ahead
        self._done = 0  # layers
        self._inputs: list[Array] = []  # of the layer before and of this one
        self._queries: Array | None = None
        self._valid = jnp.asarray(tokens.valid)
        self._places = offsets(config.rope, config.max_positions, tokens.ids.shape[1])
        plan = blueprint(config, jnp.float32)
        positions = jnp.broadcast_to(jnp.arange(tokens.ids.shape[1]), tokens.ids.shape)
        self._hidden = plan.embedding(embedding).embed(jnp.asarray(tokens.ids), positions)

    def layer(self, params: Params) -> Moments:
        """Run the next layer with these float32 parameters; its query and key moments.

        They are those of the text at all places where the model has positions for it.
        """
        with jax.default_matmul_precision("highest"):  # GPUs would round products to TF32
            step = _step(self._config, self._ahead, self._config.window_of(self._done))
            self._hidden, sums, seen = step(params, self._hidden, self._valid)
        self._done += 1
        if seen is not None:
            self._queries, inputs = seen
            self._inputs = [*(self._inputs or [inputs])[-1:], inputs]
        # Summed over windows in float64, on the host.
        query_gram, key_gram, key_sum = (np.asarray(s, np.float64).sum(axis=0) for s in sums)
        if not np.isfinite(query_gram).all() or not np.isfinite(key_gram).all():
            raise InputError("the weights give queries or keys that are not finite; get them again")
        found = Moments(self._count, self._config.group_size, query_gram, key_gram, key_sum)
        if self._places == 1:
            return found
        assert self._config.rope is not None
        return spread_moments(found, self._config.rope, self._places)

    def ahead(self, params: Params) -> tuple[Projection, GuessMoments]:
        """For the layer that `layer` ran last: its query of the input of the layer before.

        Of the first layer, whose rows are fetched by its own input, the query is the true one.

        Returns:
            The corrected projection; moments of the queries that it gives, scaled and rotated, at
            all places as in `layer`.
        """
        config, valid = self._config, np.asarray(self._valid)
        before, own = (np.asarray(x)[valid] for x in self._inputs)
        query = params["q"]
        fitted = corrected_projection(before, own, query["kernel"], query.get("bias"))
        assert self._queries is not None
        with jax.default_matmul_precision("highest"):
            guesses = projected_query(
                blueprint(config, jnp.float32).layer(params),
                {name: jnp.asarray(getattr(fitted, name), jnp.float32) for name in AHEAD},
                self._inputs[0],
                jnp.broadcast_to(jnp.arange(valid.shape[1]), valid.shape),
                jnp.full(valid.shape, valid.shape[1]),
            )
        guesses, queries = (np.asarray(x)[valid] for x in (guesses, self._queries))
        found = guess_moments(guesses, queries, config.num_kv_heads)
        if self._places == 1:
            return fitted, found
        assert config.rope is not None
        return fitted, spread_guess(found, config.rope, self._places)


Sums = tuple[Float[Array, "w k d d"], Float[Array, "w k d d"], Float[Array, "w k d"]]


@functools.cache
def _step(config: ModelConfig, keep: bool, sliding: int | None) -> Callable[..., Any]:
    """One layer over all windows; compiled once, it serves every layer of a kind.

    Args:
        keep: also return the layer's queries and attention inputs.
        sliding: the layer's own window, if it has one.
    """
    plan = blueprint(config, jnp.float32)

    def window(params: Params, x: Array, valid: Array) -> tuple[Array, Any, Any]:
        layer = plan.layer(params)
        positions = jnp.arange(x.shape[0])
        lengths = jnp.full_like(positions, len(positions))
        a = layer.attention_input(x)
        queries = layer.query(a, positions, lengths)
        keys, values = layer.key_value(a, positions, lengths)
        real = valid.astype(x.dtype)[:, None, None]
        q, k = queries * real, keys * real
        q = q.reshape(-1, config.num_kv_heads, config.group_size, config.head_dim)
        sums = (
            jnp.einsum("skgd,skge->kde", q, q),
            jnp.einsum("skd,ske->kde", k, k),
            k.sum(axis=0),
        )
        attended = causal_attention(queries, keys, values, window=sliding)
        x = x + layer.attention_output(attended)
        return x + layer.mlp(x), sums, (queries, a) if keep else None

    def step(params: Params, x: Float[Array, "w s e"], valid: Bool[Array, "w s"]) -> Any:
        return jax.lax.map(lambda pair: window(params, *pair), (x, valid))

    return jax.jit(step, donate_argnums=1)
