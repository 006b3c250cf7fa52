"""Calibration: run a text through the model layer by layer and collect query and key moments.

Memory holds the hidden states of the text and one layer's weights. The query correction and the
loss measurement also need the hidden state that the query is computed from, of one layer, and the
input, queries, keys and values of another. All arithmetic is float32 with full-precision products,
for every dtype of the checkpoint.
"""

import concurrent.futures
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
from infinigen_jax.files.regular import read_text
from infinigen_jax.models import ModelConfig, Params, blueprint
from infinigen_jax.models.forward import causal_attention
from infinigen_jax.models.linear import project
from infinigen_jax.skew.basis import GuessMoments, Moments, guess_moments
from infinigen_jax.skew.positions import mean_over_positions, offsets
from infinigen_jax.skew.query_correction import corrected_projection
from infinigen_jax.skew.tail_moments import BlockMoments, block_products
from infinigen_jax.text.tokenizer import Tokenizer, check_vocabulary

DEFAULT_TEXT = Path(__file__).parent / "calibration.txt"
DEFAULT_TOKENS = 2048
CHARACTERS_PER_TOKEN = 64  # upper bound, to read enough of a long text


class CalibrationTokens(NamedTuple):
    """Token ids in windows of equal length; `valid` is False on padding at the end."""

    ids: Int[np.ndarray, "w s"]
    valid: Bool[np.ndarray, "w s"]
    sha256: str

    @property
    def count(self) -> int:
        """Number of tokens, excluding padding."""
        return int(self.valid.sum())


def tokenized_file(
    path: Path, tokenizer: Tokenizer, config: ModelConfig, limit: int
) -> CalibrationTokens:
    text = read_text("calibration", path, limit * CHARACTERS_PER_TOKEN)
    ids = tokenizer.encode(text)
    return windows(np.asarray(ids, np.int64), config, limit, str(path), text.encode())


def windows(
    ids: Int[np.ndarray, " n"], config: ModelConfig, limit: int, name: str, source: bytes
) -> CalibrationTokens:
    """Cut token ids into windows as long as the model has positions; pad the last window.

    Shorter windows of equal length would be worse: rotated queries and keys depend on the position,
    and a basis from the first positions is poor at later ones (docs/removed.md). `skew.positions`
    extends moments to positions that no window reaches. If the text starts with the
    beginning-of-sequence token, every window does.
    """
    ids = ids[:limit]
    if len(ids) < config.head_dim:
        raise InputError(
            f"{name}: the calibration text has {len(ids)} tokens, but a head size of "
            f"{config.head_dim} needs at least {config.head_dim}: give a longer text"
        )
    check_vocabulary("calibration", ids, config.vocab_size)
    prefix = ids[:1] if ids[0] == config.bos_id and config.max_positions > 1 else ids[:0]
    body = ids[len(prefix) :]
    capacity = config.max_positions - len(prefix)
    count = max(1, -(-len(body) // capacity))
    body = body[: limit - count * len(prefix)]
    length = min(capacity, len(body))
    count = -(-len(body) // length)
    padded = np.pad(body, (0, count * length - len(body))).reshape(count, length)
    valid = (np.arange(count * length) < len(body)).reshape(count, length)
    first = np.tile(prefix, (count, 1))
    return CalibrationTokens(
        np.concatenate([first, padded], axis=1).astype(np.int32),
        np.concatenate([np.ones(first.shape, bool), valid], axis=1),
        hashlib.sha256(source).hexdigest(),
    )


class Calibrator:
    """Propagation of a text's hidden states from layer to layer.

    The next layer's query is computed from `speculate_from`, one of `settings.policy.SOURCES`.
    `blocks` has the block moments of the layer that `layer` ran last.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokens: CalibrationTokens,
        embedding: Params,
        speculate_from: str = "input",
    ):
        self._config = config
        self._count = tokens.count
        self._source = speculate_from
        self._layers_done = 0
        # Of the previous layer: the state that a query is computed from, and the attention input.
        self._before: tuple[Array, Array] | None = None
        self._stand_ins: tuple[Array, ...] = ()  # substitutes for the latter, the one in use first
        self._seen: tuple[Array, ...] = ()  # of this layer, see `_step`
        self._guesses: tuple[Array, ...] = ()
        self._valid = jnp.asarray(tokens.valid)
        architecture = blueprint(config, jnp.float32)
        positions = jnp.broadcast_to(jnp.arange(tokens.ids.shape[1]), tokens.ids.shape)
        self._hidden = architecture.embedding(embedding).embed(jnp.asarray(tokens.ids), positions)

    def layer(self, params: Params) -> Moments:
        """Run the next layer, in float32; return its query and key moments."""
        config, self._seen = self._config.of(self._layers_done), ()  # its memory is needed
        with jax.default_matmul_precision("highest"):  # GPUs would round products to TF32
            step = _step(config, self._source, config.window_of(self._layers_done))
            self._hidden, sums, self._seen = step(params, self._hidden, self._valid)
        self._layers_done += 1
        self._guesses = ()
        attention_input, source, *_ = self._seen
        stand_in, previous_input = self._before or (attention_input, attention_input)
        if self._source == "resident":
            if self._before is not None:
                stand_in = _normed(self._config, params, stand_in)
            self._stand_ins = stand_in, previous_input
        else:
            self._stand_ins = (stand_in,)
        self._before = source, attention_input
        # Means over tokens, on the host in float64.
        means = [np.asarray(s, np.float64).sum(axis=0) / self._count for s in sums]
        if not all(np.isfinite(mean).all() for mean in means):
            raise InputError(
                f"the weights of layer {self._layers_done - 1} give queries, keys or values that "
                "are not finite; get them again"
            )
        query_gram, key_gram, key_mean, *blocks = means
        self.blocks = BlockMoments(*blocks)
        return Moments(query_gram / config.group_size, key_gram, key_mean)

    def ahead(self, params: Params) -> tuple[Params, GuessMoments]:
        """Fit the query of the layer that `layer` ran last to the previous layer's hidden state.

        The first layer speculates from its own input, so its query is the true one. Return the
        corrected projection {"weight", "bias"}, float32, and the moments of its queries, scaled,
        rotated and extended to all positions by `extend_to_all_positions`.
        """
        valid, query = np.asarray(self._valid), params["q"]
        target, queries = (np.asarray(self._seen[i])[valid] for i in (0, 3))

        def fit(stand_in: Array) -> Params:
            inputs = np.asarray(stand_in)[valid]
            fitted = corrected_projection(inputs, target, query["weight"].T, query.get("bias"))
            arrays = {"weight": fitted.kernel.T, "bias": fitted.bias}
            return {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}

        with concurrent.futures.ThreadPoolExecutor() as pool:
            projections = list(pool.map(fit, self._stand_ins))
        pairs = zip(projections, self._stand_ins, strict=True)
        self._guesses = tuple(_guess(self._config, params, *pair) for pair in pairs)
        guesses = np.asarray(self._guesses[0])[valid]
        moments = guess_moments(guesses, queries, self._config.num_kv_heads)
        return projections[0], self.extend_to_all_positions(moments, params)

    def loss(self, params: Params) -> Float[np.ndarray, "n m"]:
        """Return the relative error of sparse attention in the layer that `layer` ran last.

        Axis 0: rows selected by the true queries; by the queries speculated one layer earlier,
        corrected if `ahead` was called; and, if those come from "resident", by queries from the
        layer's input. Axis 1: each of the m `loss.BUDGETS`. NaN if no window is long enough. See
        `convert.loss`.
        """
        guesses, self._guesses = self._guesses, ()
        guesses = guesses or (_guess(self._config, params, params["q"], self._stand_ins[0]),)
        _, _, hidden, queries, keys, values = self._seen
        self._seen = ()
        with jax.default_matmul_precision("highest"):
            squares = squared_errors(
                self._config, params, hidden, queries, guesses, keys, values, self._valid
            )
        whole, errors = (np.asarray(s, np.float64).sum(axis=0) for s in squares)
        with np.errstate(invalid="ignore"):
            return np.sqrt(errors / whole).astype(np.float32)

    def extend_to_all_positions(self, moments: Any, params: Params) -> Any:
        """Extend moments of the layer that ran last to all positions where the text can start.

        Not in the paper.
        """
        rope, factors = self._config.rope_of(self._layers_done - 1), []
        places = offsets(rope, self._config.max_positions, self._valid.shape[1])
        if self._config.norm_after_rotation:
            scales = (np.asarray(params[n]["scale"], np.float64) for n in ("q_norm", "k_norm"))
            factors = [np.where(scale == 0, 1.0, scale) for scale in scales]
        if rope is None or places == 1:
            return moments
        return mean_over_positions(moments, rope, places, *factors)


@functools.partial(jax.jit, static_argnums=0)
def _normed(
    config: ModelConfig, params: Params, hidden: Float[Array, "w s e"]
) -> Float[Array, "w s e"]:
    return blueprint(config, jnp.float32).layer(params).attention_input(hidden)


@functools.partial(jax.jit, static_argnums=0)
def _guess(
    config: ModelConfig, params: Params, projection: Params, stand_in: Float[Array, "w s e"]
) -> Float[Array, "w s h d"]:
    """Return a layer's queries, scaled and rotated, from a substitute for its input."""
    windows, length, _ = stand_in.shape
    positions = jnp.broadcast_to(jnp.arange(length), (windows, length))
    layer = blueprint(config, jnp.float32).layer(params)
    lengths = jnp.full_like(positions, length)
    with jax.default_matmul_precision("highest"):
        return layer.finish_query(project(stand_in, projection), positions, lengths)


@functools.cache
def _step(config: ModelConfig, source: str, sliding: int | None) -> Callable[..., Any]:
    """Compile the pass of one layer over all windows, once for all layers of a kind.

    It returns the hidden states, the sums of the moments, and the arrays that `Calibrator` keeps:
    the layer's attention input, the substitute for the next layer's input, the hidden states into
    the layer, queries, keys and values. The substitute is `source`, one of
    `settings.policy.SOURCES`.
    """
    architecture = blueprint(config, jnp.float32)
    attend = functools.partial(causal_attention, cap=config.attention_softcap)

    def window(params: Params, x: Array, valid: Array) -> tuple[Array, Any, Any]:
        layer = architecture.layer(params)
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
        attended = attend(queries, keys, values, window=sliding)
        attended_state = x + layer.attention_output(attended, a)

        stand_in = a
        if source == "resident":
            recent = RECENT if sliding is None else min(RECENT, sliding)
            sinks = SINKS if sliding is None else 0
            near = attend(queries, keys, values, window=recent, sinks=sinks)
            stand_in = x + layer.attention_output(near, a)
        seen = (a, stand_in, x, queries, keys, values)
        return layer.after_mlp(attended_state, a), sums, seen

    def step(params: Params, x: Float[Array, "w s e"], valid: Bool[Array, "w s"]) -> Any:
        return jax.lax.map(lambda pair: window(params, *pair), (x, valid))

    return jax.jit(step, donate_argnums=1)
