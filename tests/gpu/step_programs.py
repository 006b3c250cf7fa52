"""The package's own compiled functions, compiled for a GPU from shapes alone.

A LLaMA-shaped model of half-precision weights: large enough that its buffers differ in size and
compile as those of a large model do, small enough to take a minute.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_for_gpu import Program, compile_for_gpu
from jax._src.cudnn import fused_attention_stablehlo
from reading import AsyncPair, async_pairs

from benchmarks.prefill import cache_shapes
from infinigen_jax import InfiniGen, Pool, cuda
from infinigen_jax.cache.cache import Cache, HostLayer
from infinigen_jax.cache.host_array import Placement, default_mesh
from infinigen_jax.decode import state
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.steps import steps
from infinigen_jax.loading.load import Ahead, Basis, Model
from infinigen_jax.models import ModelConfig, blueprint
from infinigen_jax.models.base import HEAD_NORMS, PRE_NORMS
from infinigen_jax.models.rope import Rope
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill import cudnn_attention as fused_attention
from infinigen_jax.prefill.compiled import empty, keep, read_layer
from infinigen_jax.selection.select import Request
from infinigen_jax.transfer import Transfer
from infinigen_jax.transfer.host_weights import in_host_memory, placement

LAYERS, DENSE, BATCH, CAPACITY, PROMPT = 6, 2, 2, 8192, 128
FETCHING = range(DENSE - 1, LAYERS - 1)  # layers of the fused step that fetch for the next
TRANSFERS = pytest.mark.parametrize("transfer", [Transfer(), Transfer("cuda")], ids=["xla", "cuda"])
DTYPE = jnp.dtype(jnp.bfloat16)
SETTINGS: dict[str, Any] = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 2816}
SETTINGS |= {"num_heads": 16, "num_kv_heads": 8, "head_dim": 64, "max_positions": CAPACITY}
SETTINGS |= dict.fromkeys(("tie_embeddings", "attention_bias", "mlp_bias"), False)
CONFIG = ModelConfig(
    family="llama", num_layers=LAYERS, norm_eps=1e-5, activation="silu", rope=Rope(), **SETTINGS
)
# Every other layer attends to a window, with other heads, and the others' values are their keys.
WINDOW = 1024
SLIDING = dataclasses.replace(
    CONFIG,
    family="gemma4",
    sliding_window=WINDOW,
    sliding_layers=(1, 3, 5),
    window_shape=(4, 32),
    values_from_keys=True,
    norms=(*PRE_NORMS, *HEAD_NORMS),
)
POLICY = InfiniGen(budget=0.05, window=32)
SCALES = ()  # of rows in the model's own format

ROW = 2 * CONFIG.head_dim * DTYPE.itemsize  # bytes of a cached token, of one KV head
HEADS = BATCH * CONFIG.num_kv_heads
LAYER_BYTES = HEADS * CAPACITY * ROW
HOST_BYTES = (LAYERS - DENSE) * LAYER_BYTES
FETCHED = POLICY.request_size(CAPACITY)
FETCHED_BYTES = HEADS * FETCHED * ROW
FLUSHED_BYTES = HEADS * POLICY.window * ROW  # of a layer
# A layer's ring and sinks, and the sums of the other values.
BLOCKS = CAPACITY // POLICY.tail_block
RESIDENT_BYTES = HEADS * ((POLICY.sinks + POLICY.window) * ROW + BLOCKS * CONFIG.head_dim * 4)
# Bytes of a layer's weights that come from the host, if the weights are there.
MOVED = [
    leaf.size * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(in_host_memory(blueprint(CONFIG, DTYPE).layer_shapes))
]
# The smallest matrices of a layer: to the queries, to keys and values, and the output projection.
WEIGHT_BYTES = CONFIG.hidden_size * CONFIG.query_width * DTYPE.itemsize


@functools.cache
def decoder(
    transfer: Transfer | None = None,
    hot_set: float = 0.0,
    weights_on: str = "device",
    config: ModelConfig = CONFIG,
    speculate_from: str = "input",
) -> Decoder:
    policy = dataclasses.replace(POLICY, speculate_from=speculate_from)
    given: dict[str, Any] = {"hot_set": hot_set, "weights_on_host": weights_on == "host"}
    chosen = transfer or Transfer()
    return Decoder(config, DTYPE, policy, chosen, DENSE, default_mesh(), **given)


def _shaped(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    """Return the shape of an array with its placement."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _placed(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda leaf: _shaped(leaf.shape, leaf.dtype, sharding), tree)


@functools.cache
def weights(weights_on: str = "device", config: ModelConfig = CONFIG) -> state.Weights:
    """Return the shapes of everything constant."""
    architecture = blueprint(config, DTYPE)
    params = {
        "embedding": architecture.embedding_shapes,
        "layers": [architecture.of(i).layer_shapes for i in range(LAYERS)],
    }
    square = jnp.zeros((CONFIG.num_kv_heads, CONFIG.head_dim, CONFIG.head_dim), jnp.float32)
    basis = Basis(square, square)
    shapes = {"weight": (CONFIG.query_width, CONFIG.hidden_size), "bias": (CONFIG.query_width,)}
    projection = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def prepare(params: Any) -> Any:
        model = Model.from_params(config, params, DTYPE, bases=[basis] * LAYERS, skew="balanced")
        model = dataclasses.replace(
            model,
            ahead=(Ahead(projection, basis),) * LAYERS,
            key_mean=np.zeros((LAYERS, *square.shape[:2]), np.float32),
        )
        return tuple(POLICY.prepare(model, i) for i in decoder(config=config).on_host)

    policy = jax.eval_shape(prepare, params)
    constant = _placed(state.Weights(params, policy), Placement(default_mesh()).whole)
    layers = constant.params["layers"]
    there = jax.tree.map(
        lambda x, place: _shaped(x.shape, x.dtype, place),
        layers,
        placement(layers, weights_on, default_mesh()),
    )
    return constant._replace(params=constant.params | {"layers": there})


def row_copies(program: Program) -> list[AsyncPair]:
    """Return copies of fetched rows to the device, with the work launched meanwhile."""
    return [pair for pair in async_pairs(program) if pair.start.nbytes == FETCHED_BYTES]


def _cache(made: Decoder | None = None) -> Cache:
    return cache_shapes(made or decoder(), BATCH, CAPACITY)


def _scalar() -> Any:
    return _shaped((), jnp.int32, Placement(default_mesh()).whole)


@functools.cache
def fused(transfer: Transfer | None = None, hot_set: float = 0.0, **given: Any) -> Program:
    """Return the whole greedy step; with the `cuda` transfer, kernels select and reuse rows."""
    options = given.pop("options", None)
    made = decoder(transfer, hot_set, **given)
    cache, weights_on = _cache(made), "host" if made.weights_on_host else "device"
    with mock.patch.object(cuda, "in_use", lambda: made.transfer.name == "cuda"):
        step = steps.__wrapped__(made).fused  # not a trace of the other kind
        arguments = weights(weights_on, made.config), *cache.parts(observes=False), cache.lengths
        return compile_for_gpu(step, *arguments, options=options)


def _carry() -> state.Carry:
    """Return the carry into a layer on the host, with its rows fetched."""
    at = Placement(default_mesh())
    b, k = BATCH, CONFIG.num_kv_heads
    request = Request(*(_shaped(shape, jnp.int32, at.rows) for shape in ((b, k, FETCHED), (b, k))))
    rows = _shaped((b, k, FETCHED, 2 * CONFIG.head_dim), DTYPE, at.rows)
    x = _shaped((b, CONFIG.hidden_size), DTYPE, at.batch)
    fetched = _shaped((b,), jnp.int32, at.batch)
    return state.Carry(x, state.Fetched(request, rows), state.Counts(fetched, fetched))


@functools.cache
def fetching_layer(
    weights_on: str = "device", transfer: Transfer | None = None, hot_set: float = 0.0
) -> Program:
    """Return a host layer that fetches for the next one, as the layerwise schedule runs it."""
    made, constant = decoder(transfer, hot_set, weights_on), weights()
    cache, layers = _cache(made), constant.params["layers"]
    target = state.Target(layers[-1], constant.policy[-1], cache.states[-1], _scalar())
    place = HostLayer(_scalar(), SCALES, constant.policy[0], cache.states[0])
    upcoming = weights("host").params["layers"][-1:] if weights_on == "host" else []
    given = state.LayerInputs(layers[DENSE], upcoming, cache.host, place, target, cache.lengths)
    local = state.LayerState(cache.local[-1], cache.hot[-1], None)
    with mock.patch.object(cuda, "in_use", lambda: made.transfer.name == "cuda"):
        return compile_for_gpu(steps(made).pieces.layers, [given], [local], _carry())


@functools.cache
def flush() -> Program:
    """Return the update of the host cache, once every `window` steps."""
    cache = _cache()
    layer = cache.host, cache.states[0], cache.local[-1], SCALES
    given = (weights().policy[0], _scalar(), *layer, cache.lengths)
    return compile_for_gpu(steps(decoder()).flush, *given, keywords={"streams": False})


@functools.cache
def flush_pool() -> Program:
    """Return the flush into a pool with one slot for each position."""
    at, cache = Placement(default_mesh()), _cache()
    policy = dataclasses.replace(POLICY, tail_tokens=0)
    limited = dataclasses.replace(decoder(), policy=policy, pool=Pool(tokens=CAPACITY))
    sizes = {"batch": BATCH, "capacity": CAPACITY, "slots": CAPACITY}
    shapes = empty.of(limited).trace(cache.lengths, **sizes).out_info
    pooled = _placed(shapes._replace(lengths=None), at.rows)
    pooled = pooled._replace(host=cache.host, lengths=cache.lengths)
    return compile_for_gpu(steps(limited).flush_pool, weights().policy, pooled)


@functools.cache
def prompt_layer(weights_on: str = "device", by_cudnn: bool = False) -> Program:
    """Return one layer on the host over a chunk of a prompt."""
    at, cache = Placement(default_mesh()), _cache()
    upcoming = tuple(weights("host").params["layers"][-1:]) if weights_on == "host" else ()
    layer, span = weights().params["layers"][DENSE], Span(cache.lengths, cache.lengths)
    x = _shaped((BATCH, PROMPT, CONFIG.hidden_size), DTYPE, at.batch)
    given = (layer, x, None, (cache.host, _scalar(), SCALES), upcoming, span, cache.lengths)
    program = read_layer.compile(decoder(weights_on=weights_on))  # traced again
    with cudnn_attention() if by_cudnn else contextlib.nullcontext():
        return compile_for_gpu(program, *given)


@contextlib.contextmanager
def cudnn_attention() -> Iterator[None]:
    """Act like a GPU with cuDNN: JAX asks about the GPU before it calls cuDNN."""
    answers = {"check_cudnn_version": 91200, "check_compute_capability": True}
    answers |= {"is_cuda_compute_capability_equal": False}
    asked = {name: mock.Mock(return_value=answer) for name, answer in answers.items()}
    usable = mock.patch.object(fused_attention, "usable", lambda *_: True)
    with mock.patch.multiple(fused_attention_stablehlo, **asked), usable:
        yield


@functools.cache
def keep_rows() -> Program:
    """Return the rows that the layer writes."""
    at, cache = Placement(default_mesh()), _cache()
    shape = (BATCH, CONFIG.num_kv_heads, PROMPT, 2 * CONFIG.head_dim)
    rows, span = _shaped(shape, DTYPE, at.rows), Span(cache.lengths, cache.lengths)
    kept_there = cache.local[-1], cache.states[-1], SCALES, cache.host, _scalar()
    given = (weights().policy[0], rows, span, *kept_there)
    return compile_for_gpu(keep.of(decoder()), *given, keywords={"streams": False})
