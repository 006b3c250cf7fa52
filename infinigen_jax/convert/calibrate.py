"""Calibration: run a text through the model, one layer at a time, and collect q and k moments.

Only the hidden states of the text and one layer's weights are in memory; for the correction of the
layer-ahead query, and for what few rows lose, also what that query is guessed from, of one layer,
and the input, queries, keys and values of another. All arithmetic is float32 with full-precision
products, whatever the checkpoint's dtype.
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

from infinigen_jax.convert.loss import RECENT, SINKS, squared_errors
from infinigen_jax.errors import InputError
from infinigen_jax.models import ModelConfig, Params, blueprint
from infinigen_jax.models.forward import causal_attention
from infinigen_jax.skew.basis import GuessMoments, Moments, guess_moments
from infinigen_jax.skew.neurons import Mlp, activations
from infinigen_jax.skew.positions import offsets, spread_blocks, spread_guess, spread_moments
from infinigen_jax.skew.query_correction import corrected_projection
from infinigen_jax.skew.tail_moments import BlockMoments, block_products
from infinigen_jax.speculation.query import projected_query
from infinigen_jax.text.tokenizer import load_tokenizer

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
    ids = load_tokenizer(folder).encode(text)
    return windows(np.asarray(ids, np.int64), config, limit, str(path), text.encode())


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


class Before(NamedTuple):
    """What the query of a layer is guessed from: of the layer before it.

    Attributes:
        input: into its attention.
        source: what stands in for the next layer's input, see `_step`.
    """

    input: Float[Array, "w s e"]
    source: Float[Array, "w s e"]
    mlp: Mlp


class Calibrator:
    """Carries the text's hidden states from layer to layer.

    Attributes:
        blocks: moments of the layer that `layer` ran last, at all places likewise.

    Args:
        config: the architecture.
        tokens: the text.
        embedding: the embedding's parameters, float32.
        speculate_from: what of the layer before a query is guessed from, one of
            `speculation.SOURCES`; None: keep nothing of what `ahead` and `loss` need.
        neurons: of that layer's MLP that the query sees besides.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokens: CalibrationTokens,
        embedding: Params,
        speculate_from: str | None = None,
        neurons: int = 0,
    ):
        self._config = config
        self._count = tokens.count
        self._source = speculate_from
        self._done = 0  # layers
        self._neurons = neurons
        self._before: Before | None = None
        self._inner: Params = {}  # of the neurons that a query of this layer sees
        self._own: Array | None = None  # this layer's attention input
        self._stand_in: Array | None = None  # for it
        self._attended: tuple[Array, ...] | None = None  # hidden states, queries, keys, values
        self._guesses: tuple[Array, ...] = ()
        self._input: Array | None = None  # of the layer before, where another state stands in
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
            sliding = self._config.window_of(self._done)
            step = _step(self._config, self._source, sliding)
            self._hidden, sums, seen = step(params, self._hidden, self._valid)
        self._done += 1
        if seen is not None:
            own, source, *attended = seen
            self._attended, self._guesses = tuple(attended), ()
            before, self._own, self._stand_in = self._before, own, own
            if before is not None:
                self._stand_in = before.source
            if self._source == "resident":
                self._input = own if before is None else before.input
                if before is not None:
                    self._stand_in = _normed(self._config, params, before.source)
            self._inner = self._chosen(params)
            self._before = Before(own, source, Mlp(params))
        # Summed over windows in float64, on the host.
        query_gram, key_gram, key_sum, *blocks = (
            np.asarray(s, np.float64).sum(axis=0) for s in sums
        )
        if not all(np.isfinite(products).all() for products in (query_gram, key_gram, *blocks)):
            raise InputError(
                f"the weights of layer {self._done - 1} give queries, keys or values that are not "
                "finite; get them again"
            )
        found = Moments(self._count, self._config.group_size, query_gram, key_gram, key_sum)
        self.blocks = BlockMoments(*(products / self._count for products in blocks))
        if self._places == 1:
            return found
        assert self._config.rope is not None
        self.blocks = spread_blocks(self.blocks, self._config.rope, self._places)
        return spread_moments(found, self._config.rope, self._places)

    def ahead(self, params: Params) -> tuple[Params, GuessMoments]:
        """For the layer that `layer` ran last: its query by a layer before.

        Of the first layer, whose rows are fetched by its own input, the query is the true one.

        Returns:
            The corrected projection, see `neurons.projected`, float32; moments of the queries that
            it gives, scaled and rotated, at all places as in `layer`.
        """
        config, valid = self._config, np.asarray(self._valid)
        before, own = (np.asarray(x)[valid] for x in (self._stand_in, self._own))
        query, hidden = params["q"], None
        if self._inner:
            with jax.default_matmul_precision("highest"):
                hidden = activations(config, self._inner, jnp.asarray(before))
        fitted = corrected_projection(before, own, query["kernel"], query.get("bias"), hidden)
        assert self._attended is not None
        projection = {"kernel": fitted.kernel, "bias": fitted.bias, "outer": fitted.outer}
        projection = {
            n: jnp.asarray(p, jnp.float32) for n, p in projection.items() if p is not None
        }
        projection |= self._inner
        assert self._stand_in is not None
        self._guesses = (self._guess(params, projection, self._stand_in),)
        if self._input is not None:
            seen = np.asarray(self._input)[valid]
            plain = corrected_projection(seen, own, query["kernel"], query.get("bias"))
            plain = {n: jnp.asarray(getattr(plain, n), jnp.float32) for n in ("kernel", "bias")}
            self._guesses += (self._guess(params, plain, self._input),)
        guesses, queries = (np.asarray(x)[valid] for x in (self._guesses[0], self._attended[1]))
        found = guess_moments(guesses, queries, config.num_kv_heads)
        if self._places == 1:
            return projection, found
        assert config.rope is not None
        return projection, spread_guess(found, config.rope, self._places)

    def loss(self, params: Params) -> Float[np.ndarray, "n m"]:
        """For the layer that `layer` ran last: relative error that few rows make.

        Returns:
            With rows chosen by its own queries, and by those of a layer before: corrected, if
            `ahead` was called, else plain; and, where those are guessed behind attention to what is
            resident, by those of the layer's input; at each of the m `loss.BUDGETS`. NaN if no
            window is long enough. See `convert.loss`.
        """
        assert self._attended is not None
        guesses, self._guesses = self._guesses, ()
        if not guesses:
            assert self._stand_in is not None
            guesses = (self._guess(params, params["q"], self._stand_in),)
        hidden, queries, keys, values = self._attended
        self._attended = None
        with jax.default_matmul_precision("highest"):
            squares = squared_errors(
                self._config, params, hidden, queries, guesses, keys, values, self._valid
            )
        whole, errors = (np.asarray(s, np.float64).sum(axis=0) for s in squares)
        with np.errstate(invalid="ignore"):
            return np.sqrt(errors / whole).astype(np.float32)

    def _chosen(self, params: Params) -> Params:
        """The neurons of the layer before that a query of the layer with these parameters sees."""
        if not self._neurons or self._before is None:
            return {}
        mlp, norm = self._before.mlp, params["attention_norm"]
        whole = mlp.under(mlp.attention_norm if self._source == "input" else norm)
        query = np.asarray(norm["scale"])[:, None] * np.asarray(params["q"]["kernel"])
        assert self._stand_in is not None
        there = self._valid.astype(jnp.float32)
        return mlp.chosen(self._config, whole, self._stand_in, there, query, self._neurons)

    def _guess(
        self, params: Params, projection: Params, stand_in: Float[Array, "w s e"]
    ) -> Float[Array, "w s h d"]:
        """The layer's queries by a projection of what stands in for its input."""
        with jax.default_matmul_precision("highest"):
            return _projected(self._config, params, projection, stand_in)


@functools.partial(jax.jit, static_argnums=0)
def _normed(
    config: ModelConfig, params: Params, hidden: Float[Array, "w s e"]
) -> Float[Array, "w s e"]:
    """Hidden states as a layer's attention would take them in."""
    return blueprint(config, jnp.float32).layer(params).attention_input(hidden)


@functools.partial(jax.jit, static_argnums=0)
def _projected(
    config: ModelConfig, params: Params, projection: Params, inputs: Float[Array, "w s e"]
) -> Float[Array, "w s h d"]:
    """A layer's queries, scaled and rotated, by another projection of other inputs."""
    windows, length, _ = inputs.shape
    positions = jnp.broadcast_to(jnp.arange(length), (windows, length))
    layer = blueprint(config, jnp.float32).layer(params)
    return projected_query(
        config, layer, projection, inputs, positions, jnp.full_like(positions, length)
    )


Products = Float[Array, "w k d d"]
Sums = tuple[Products, Products, Float[Array, "w k d"], Products, Products]


@functools.cache
def _step(config: ModelConfig, source: str | None, sliding: int | None) -> Callable[..., Any]:
    """One layer over all windows; compiled once, it serves every layer of a kind.

    Args:
        source: also return the layer's attention inputs, what of it stands in for a later layer's
            (one of `speculation.SOURCES`), hidden states into the layer, queries, keys and values.
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
            *block_products(keys, values, valid & (positions >= SINKS)),
        )
        attended = causal_attention(queries, keys, values, window=sliding)
        behind = x + layer.attention_output(attended)

        def resident() -> Array:
            recent = RECENT if sliding is None else min(RECENT, sliding)
            sinks = SINKS if sliding is None else 0
            near = causal_attention(queries, keys, values, window=recent, sinks=sinks)
            return x + layer.attention_output(near)

        seen = None
        if source is not None:
            stand_in = resident() if source == "resident" else a
            seen = (a, stand_in, x, queries, keys, values)
        return behind + layer.mlp(behind), sums, seen

    def step(params: Params, x: Float[Array, "w s e"], valid: Bool[Array, "w s"]) -> Any:
        return jax.lax.map(lambda pair: window(params, *pair), (x, valid))

    return jax.jit(step, donate_argnums=1)
