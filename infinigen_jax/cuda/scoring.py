"""Kernels that score the index, as traced functions. See score.cu."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from infinigen_jax.cuda.calls import on_each_device
from infinigen_jax.cuda.launch import call
from infinigen_jax.selection.select import Rest

THREADS = 256
WARPS = THREADS // 32
TILE = 32  # slots of a warp at a time, as in score.cu
BLOCKS = 1024  # of a launch, about: twice as many as run at a time on an H100
MAX_SHARE = 16384  # slots of a block, as in score.cu
MAX_COLUMNS = 256  # as in score.cu
LEADING = (8, 16)  # numbers of columns that the kernel can average
TAIL_BLOCKS = (32, 64, 128)  # slots per number of `index_rest`


def index_scores(
    query: Float[Array, "b k g r"], index: UInt32[Array, "b k e t"]
) -> Float[Array, "b k g t"]:
    """Return the scores of all slots, for float32 queries of at most MAX_COLUMNS columns."""

    def local(query: Array, index: Array) -> Array:
        b, k, g, _ = query.shape
        out = jax.ShapeDtypeStruct((b, k, g, index.shape[3]), jnp.float32)
        sizes = (g, *_sizes(query, index, TILE))
        (scores,) = _launch("index_scores", (query, index), (out,), sizes, sizes[-1])
        return scores

    return on_each_device(local, index, query, index)


def index_rest(
    query: Float[Array, "b k g r"],
    index: UInt32[Array, "b k e t"],
    positions: Int[Array, " b"],
    slots: Int[Array, "b k n"],
    count: Int[Array, "b k"],
    blocks: int,
    sinks: int,
    window: int,
    columns: int = 0,
) -> Rest:
    """Compute `selection.rest.log_rest` without storing the scores.

    Slots from `sinks` to position - `window` count, except the requested ones. A block has t / m
    slots, one of TAIL_BLOCKS. `columns` is c of `Rest.entry`, at most the last of LEADING; 0 for
    none.
    """
    leading = min((n for n in LEADING if n >= columns), default=0) if columns else 0

    def local(query: Array, index: Array, *others: Array) -> tuple[Array, ...]:
        b, k, g, _ = query.shape
        tail_block, size = index.shape[3] // blocks, others[1].shape[2]
        sizes = _sizes(query, index, tail_block)
        integers = (k, g, *sizes, size, tail_block, sinks, window, leading)
        score = jax.ShapeDtypeStruct((b, k, g, blocks), jnp.float32)
        # The kernel needs a pointer even if it does not write there.
        entry = jax.ShapeDtypeStruct((b, k, g, blocks if leading else 1, leading or 1), jnp.float32)
        return _launch("index_rest", (query, index, *others), (score, entry), integers, sizes[-1])

    score, entry = on_each_device(local, index, query, index, positions, slots, count)
    if not columns:
        return Rest(score)
    shares = jax.nn.softmax(jnp.maximum(score, jnp.finfo(jnp.float32).min), axis=-1)
    return Rest(score, jnp.einsum("bkgm,bkgmc->bkgc", shares, entry[..., :columns]))


def _sizes(query: Array, index: Array, warp_slots: int) -> tuple[int, int, int, int]:
    """Return columns, words of codes, capacity, and the slots of a block: whole turns of its warps.

    Every block prepares the query, so blocks are as large as BLOCKS and MAX_SHARE allow.
    """
    capacity, pairs = index.shape[3], index.shape[0] * index.shape[1]
    turn = WARPS * warp_slots
    turns = -(-capacity * pairs // (BLOCKS * turn))
    share = turn * min(max(1, turns), MAX_SHARE // turn)
    return query.shape[3], index.shape[2] - 1, capacity, share


def _launch(
    kernel: str,
    operands: tuple[Array, ...],
    outs: tuple[jax.ShapeDtypeStruct, ...],
    integers: tuple[int, ...],
    share: int,
) -> tuple[Array, ...]:
    b, k, _, capacity = operands[1].shape
    grid = (b * k * -(-capacity // share), THREADS)
    return call(kernel, operands, outs, grid, integers)
