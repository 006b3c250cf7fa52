"""Small random models in memory, and helpers for tests of the decode runtime."""

import copy
import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax
from tiny import text_log_probs

from infinigen_jax import Basis, Engine, Model, Run
from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.layers import DenseLayer, Resident
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.models import ModelConfig, Params, blueprint, config_from_hf, random_params
from infinigen_jax.policies import InfiniGen, Policy
from infinigen_jax.skew.basis import Moments
from infinigen_jax.skew.tail_moments import block_products
from infinigen_jax.speculation.index import IndexFormat
from infinigen_jax.speculation.query import partial_keys, speculate_query, speculation_weights

HF: dict[str, dict[str, Any]] = {
    "gqa": {"model_type": "llama", "num_key_value_heads": 2},
    "opt": {"model_type": "opt", "ffn_dim": 24},
    # For tests that do not depend on transitions between layers: little to compile.
    "one": {"model_type": "llama", "num_key_value_heads": 2, "num_hidden_layers": 1},
    "three": {"model_type": "llama", "num_key_value_heads": 2, "num_hidden_layers": 3},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen2-one": {"model_type": "qwen2", "num_key_value_heads": 2, "num_hidden_layers": 1},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 12},
    "gemma2": {
        **{"model_type": "gemma2", "num_key_value_heads": 2, "num_hidden_layers": 1},
        **{"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
        **{"layer_types": ["full_attention"]},
    },
    "gated": {
        **{"model_type": "muse_glimmer", "num_key_value_heads": 2, "head_dim": 8},
        **{"layer_types": ["full_attention"] * 3, "num_hidden_layers": 3},
        **{"bos_token_id": 0, "eos_token_id": 1},
    },
    "windows": {
        **{"model_type": "gemma4_text", "num_key_value_heads": 2, "num_hidden_layers": 3},
        **{"layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "full")]},
        **{"sliding_window": 9, "head_dim": 8, "hidden_size_per_layer_input": 0},
        **{"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    },
}
# One layer on the device, which speculates for one on the host; or two on the host.
COMMON: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
COMMON |= {"hidden_size": 32, "intermediate_size": 24, "max_position_embeddings": 256}


def numbers(count: int, seed: int | None = None) -> list[int]:
    """Return random token ids of a prompt."""
    rng = np.random.default_rng(count if seed is None else seed)
    return rng.integers(3, 96, count).tolist()


def padded(prompts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return prompts as the rows of an array, and their lengths."""
    tokens = np.zeros((len(prompts), max(1, *map(len, prompts))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(p) for p in prompts], np.int32)


def slow(*values: Any) -> Any:
    """Return the values of one case, marked slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_except(names: Iterable[str], *chosen: str) -> list[Any]:
    """Return the parameters of a test, marked slow except the chosen ones."""
    return [name if name in chosen else slow(name) for name in names]


def random_basis(kv_heads: int, d: int, seed: int) -> Basis:
    """Return a different orthogonal matrix for each KV head."""
    normal = np.random.default_rng(seed).normal(size=(kv_heads, d, d))
    matrix = jnp.asarray(np.linalg.qr(normal)[0], jnp.float32)
    return Basis(matrix, matrix)


def moments_of(queries: Any, keys: Any) -> Moments:
    """Return the moments of a text's queries [t, h, d] and keys [t, k, d], in float64."""
    k = np.asarray(keys, np.float64)
    q = np.asarray(queries, np.float64).reshape(len(k), k.shape[1], -1, k.shape[2])
    query_gram = np.einsum("tkgd,tkge->kde", q, q) / (q.shape[0] * q.shape[2])
    return Moments(query_gram, np.einsum("tkd,tke->kde", k, k) / len(k), k.mean(axis=0))


def tail_moments(config: ModelConfig, params: Params) -> tuple[np.ndarray, np.ndarray]:
    """Return moments of a model's own keys and values on random tokens, without attention."""
    tokens = jnp.asarray(np.random.default_rng(5).integers(3, 96, 64), jnp.int32)
    places = jnp.arange(64, dtype=jnp.int32)
    architecture, moments = blueprint(config, jnp.float32), []
    x = architecture.embedding(params["embedding"]).embed(tokens, places)

    @jax.jit
    def step(params: Params, x: jax.Array) -> tuple[jax.Array, Any]:
        layer = architecture.layer(params)
        a = layer.attention_input(x)
        keys, values = layer.key_value(a, places)
        return layer.after_mlp(x, a), block_products(keys, values, jnp.ones(64, bool))

    shape = config.num_kv_heads, *(config.head_dim,) * 2
    for number, each in enumerate(params["layers"]):
        x, products = step(each, x)
        windowed = number not in config.full_attention_layers
        moments.append([np.zeros(shape)] * 2 if windowed else products)
    keys, values = (np.stack([np.asarray(m[i]) for m in moments]) for i in range(2))
    return keys, values


def with_config(model: Model, **changes: Any) -> Model:
    """Return a model with other settings."""
    return dataclasses.replace(model, config=dataclasses.replace(model.config, **changes))


def with_rope(model: Any, **changes: Any) -> Model:
    """Return a model whose keys rotate in another way."""
    return with_config(model, rope=dataclasses.replace(model.config.rope, **changes))


def long_rope(name: str, original: int) -> Model:
    """Return a random model whose keys rotate differently in texts above `original` tokens."""
    model = random_model(name)
    columns = model.config.head_dim // 2
    factors = {"short_factors": (1.0,) * columns, "long_factors": (2.0,) * columns}
    return with_rope(model, kind="longrope", original_positions=original, **factors)


@functools.cache
def random_model(name: str, dtype: str = "float32", with_basis: bool | None = None) -> Model:
    """Return a model by name, always the same object, so that compilations are shared.

    Weights are larger than usual, and norms and biases random: queries and keys are then large
    enough for attention to choose among tokens, and for layers to differ.

    Args:
        with_basis: as after conversion by default (RoPE models have one; OPT's is absorbed).
    """
    config = config_from_hf(COMMON | HF[name])
    # However many layers there are, the first ones are the same.
    params = random_params(dataclasses.replace(config, num_layers=3), dtype)
    params = {**params, "layers": params["layers"][: config.num_layers]}
    rng = np.random.default_rng(5)

    def enlarge(path: Any, leaf: jax.Array) -> jax.Array:
        name = path[-1].key
        if name in ("scale", "bias"):
            noise = jnp.asarray(rng.normal(scale=0.2, size=leaf.shape), leaf.dtype)
            return leaf + noise
        factor = {"q": 2.0, "kv": 2.0}.get(getattr(path[-2], "key", ""), 1.0)
        return leaf * jnp.asarray(50.0 if name == "embedding" else factor, leaf.dtype)

    params = jax.tree_util.tree_map_with_path(enlarge, params)
    bases = None
    if config.rope is not None if with_basis is None else with_basis:
        size = config.num_kv_heads, config.head_dim
        bases = [random_basis(*size, i) for i in range(config.num_layers)]
    exact = dtype == "float32"
    moments = tail_moments(config, params) if exact else random_model(name).tail_moments
    model = Model.from_params(config, params, dtype, bases=bases)
    return dataclasses.replace(model, tail_moments=moments)


def with_ends(engine: Engine, *tokens: int) -> Engine:
    """Return an engine whose texts end with these tokens; it shares another's compiled programs."""
    changed = copy.copy(engine)
    model = with_config(engine.model, eos_ids=tokens)
    changed.runtime = dataclasses.replace(engine.runtime, model=model)
    return changed


# A small window and few sinks, so that most rows are on the host and flushes are frequent.
# Rows are requested one layer ahead, as where they have to be moved.
NARROW: dict[str, Any] = {"window": 4, "sinks": 2, "query": "plain"}
SPARSE = InfiniGen(
    budget=0.2, partial_ratio=0.5, index_dtype="auto", alpha=4.0, tail=False, **NARROW
)
ALL = dataclasses.replace(SPARSE, budget=1.0, partial_ratio=0.25, alpha=float("inf"))
# With a tail over an exact index of every column.
TAILED = InfiniGen(
    budget=0.1, partial_ratio=1.0, index_dtype="float32", alpha=float("inf"), tail=True, **NARROW
)

RAGGED = [numbers(n) for n in (37, 5, 21)]  # one shorter than window and sinks together
NEW = 14  # several windows


@functools.cache
def engine(
    name: str,
    policy: Policy = SPARSE,
    dense_layers: int | None = -1,
    schedule: str = "fused",
    **settings,
) -> Engine:
    """Return an engine, always the same one, so that its compilations are shared.

    Args:
        dense_layers: by default one, and none of a model of one layer.
    """
    if dense_layers == -1:
        dense_layers = min(1, random_model(name).config.num_layers - 1)
    settings |= {"policy": policy, "dense_layers": dense_layers, "schedule": schedule}
    return Engine(random_model(name), **settings)


def tokens_of(engine: Engine, prompts=RAGGED, new: int = NEW, **settings) -> list[list[int]]:
    return engine.generate(prompts, max_new_tokens=new, **settings).tokens


def counts_of(run: Run) -> np.ndarray:
    """Return the rows selected by each step, for each sequence."""
    return np.stack([np.asarray(counts.selected) for counts in run.counts])


def finished(engine: Engine, prompts=RAGGED, new: int = NEW, **settings) -> Run:
    run = engine.start(prompts, max_new_tokens=new, **settings)
    list(run.tokens(ignore_eos=True))
    return run


def given_tokens(context: int) -> np.ndarray:
    return np.random.default_rng(2).integers(3, 96, (2, context + 20)).astype(np.int32)


def full_scores(model: Model, context: int = 40) -> np.ndarray:
    """Return what `scores_of` returns if all rows are attended to, by a plain pass."""
    return text_log_probs(model, given_tokens(context))[:, context:].T


def scores_of(model: Model, policy: Policy, context: int = 40) -> np.ndarray:
    """Return log-probabilities of given tokens, decoded with all layers on the host."""
    tokens = given_tokens(context)
    made = Engine(model, policy=policy, dense_layers=0)
    run = made.start(tokens[:, :context].tolist(), max_new_tokens=20)
    steps = range(context, context + 19)
    return np.stack([score(run, tokens[:, i], tokens[:, i + 1]) for i in steps])


def score(run: Run, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Decode given tokens [b]; return the log-probabilities [b] of the given next ones."""
    return np.asarray(run.predict(tokens))[np.arange(len(targets)), targets]


def readable(decoder: Decoder, cache: Cache) -> list[np.ndarray]:
    """Return lengths and rows that a step may read, zeros elsewhere; not those of hot sets."""
    lengths, host = np.asarray(cache.lengths), np.asarray(cache.host)
    held = np.asarray(decoder.slots.positions(cache.lengths - 1)) >= 0

    def valid(rows: Any, there: np.ndarray | None = None) -> np.ndarray:
        there = np.arange(rows.shape[2]) < lengths[:, None] if there is None else there
        return np.where(there[:, None, :, None], np.asarray(rows), 0)

    found = [lengths]
    for scales, rows in zip(cache.scales, host, strict=True):
        found.append(valid(decoder.row_format.decode(scales, jnp.asarray(rows))))
    for local in cache.local:
        if isinstance(local, Resident):
            left = [] if local.left is None else [np.asarray(local.left)]
            found += [valid(local.rows, held), *left]
        else:  # a window is read whole
            dense = isinstance(local, DenseLayer)
            found += [valid(x) if dense else np.asarray(x) for x in local]
    return found


class PlainLayer(NamedTuple):
    """A layer's attention.

    Input [b, s, e], weights [b, h, s, s], values [b, s, h, d], module, output [b, s, e].
    """

    a: jax.Array
    weights: np.ndarray
    values: np.ndarray
    module: Any
    output: np.ndarray


def plain_pass(
    model: Model, tokens: np.ndarray, mask: np.ndarray | bool = True
) -> tuple[list[PlainLayer], np.ndarray]:
    """Return the attention of each layer, in NumPy, and log-probabilities [b, s, v].

    Args:
        mask: [b, h, s, s], which of the tokens up to its own each query attends to.
    """
    architecture, config = blueprint(model.config, model.dtype), model.config
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    ends = architecture.embedding(model.params["embedding"])
    x, layers = ends.embed(jnp.asarray(tokens), positions), []
    seen = np.tri(tokens.shape[1], dtype=bool) & mask
    for params in model.params["layers"]:
        layer = architecture.layer(params)
        a = layer.attention_input(x)
        q = np.asarray(layer.query(a, positions), np.float64)
        keys, values = (np.asarray(y, np.float64) for y in layer.key_value(a, positions))
        keys, values = (np.repeat(y, config.group_size, axis=2) for y in (keys, values))
        scores = np.where(seen, np.einsum("bqhd,bkhd->bhqk", q, keys), -np.inf)
        weights = softmax(scores, axis=-1)
        o = jnp.asarray(np.einsum("bhqk,bkhd->bqhd", weights, values), jnp.float32)
        output = layer.attention_output(o, a)
        layers.append(PlainLayer(a, weights, values, layer, np.asarray(output)))
        x = x + output
        x = layer.after_mlp(x, a)
    return layers, np.asarray(jax.nn.log_softmax(ends.logits(x)))


def check_speculated_logits(model: Model, number: int) -> None:
    """Compare logits from a layer's full-width index and its own input with the true logits."""
    config, rng, b, t = model.config, np.random.default_rng(0), 3, 37
    d, k = config.head_dim, config.num_kv_heads
    a = jnp.asarray(rng.normal(size=(b, config.hidden_size)).astype(np.float32))
    cached = jnp.asarray(rng.normal(size=(b, t, config.hidden_size)).astype(np.float32))
    positions = jnp.asarray([t, t + 3, t + 9], jnp.int32)
    at = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    layer = blueprint(config, model.dtype).layer(model.params["layers"][number])
    index, weights = IndexFormat("float32", d), speculation_weights(model, number, d)
    few = speculation_weights(model, number, 3)

    @jax.jit
    def compute(cached, a):
        keys = layer.key_value(cached, at)[0].swapaxes(1, 2)
        partial = partial_keys(weights, keys, d), partial_keys(few, keys, 3)
        entries = index.encode(partial[0])
        assert entries.shape == (b, k, index.entries, t) and entries.dtype == index.dtype
        query = speculate_query(config, layer, weights, a, positions, d)
        queries = query, speculate_query(config, layer, few, a, positions, 3)
        return keys, layer.query(a, positions), index.scores(query, entries), partial, queries

    keys, q, scores, (wide, narrow), queries = compute(cached, a)
    assert queries[0].shape == (b, k, config.group_size, d) and scores.dtype == jnp.float32
    grouped = np.asarray(q).reshape(b, k, config.group_size, d)
    true = np.einsum("bkgd,bktd->bkgt", grouped, keys)
    tolerance = (2e-5 if model.skew == "balanced" else 1e-5) * np.abs(true).max()
    np.testing.assert_allclose(scores, true, rtol=1e-5, atol=tolerance)
    np.testing.assert_allclose(narrow, wide[:, :, :3], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(queries[1], queries[0][..., :3], rtol=1e-5, atol=1e-5)


def copies(hlo: str) -> list[int]:
    """Return the elements of each array that a compiled program copies."""
    shapes = re.findall(r"= \w+\[([\d,]*)\][^ ]* copy\(", hlo)
    return [int(np.prod([int(n) for n in shape.split(",") if n] or [1])) for shape in shapes]
