"""Attention of a chunk of a prompt over itself and over the rows before it.

The softmax is computed online, so the largest array is one tile of scores: some queries and all
query heads of a KV head, over one block of keys.

    CPU      one tile at a time over all its keys, so that scores and softmax stay in the
             processor's cache (their memory traffic dominates)
    NVIDIA   in half precision, cuDNN's kernel: scores stay on chip (`prefill.cudnn_attention`)
    others   all heads together; attention to a block overlaps with reading the next one
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.ops.attention import MASKED, Softmax, soft_capped, start_softmax
from infinigen_jax.ops.indexing import by_head
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill import cudnn_attention as fused_attention
from infinigen_jax.prefill.prior_rows import BLOCK, NOWHERE, Block, ChunkAttention, PriorRows

DIAGONAL_BLOCK = 512  # for the chunk's own keys; small, as blocks on the diagonal are half masked
CPU_TILE = 1536  # most rows of a tile: queries times query heads of a KV head
DEVICE_TILE_BYTES = 1 << 26  # for all tiles processed together
MASS_QUERIES = 256  # queries per tile of `attention_mass`


def attend_chunk(
    q: Float[Array, "b c h d"],
    keys: Float[Array, "b c k d"],
    values: Float[Array, "b c k d"],
    prior: PriorRows | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> ChunkAttention:
    """Return causal attention of a chunk, over itself and over the rows before it.

    Padding on the right affects only outputs at padded positions.

    Args:
        q: scaled queries; query head h reads KV head h // (h / k).
        window: number of tokens, including itself, that a token attends to; None for all prior
            ones.
    """
    cpu, default = (functools.partial(_attend, prior, window, cap, all) for all in (False, True))
    if cap is None and fused_attention.usable(q, keys.shape[2], prior, window):
        default = functools.partial(fused_attention.attend, prior, window)
    return lax.platform_dependent(q, keys, values, cpu=cpu, default=default)


class _Chunk(NamedTuple):
    """A chunk, arranged by KV head of each sequence (n = b k), and settings of `attend_chunk`."""

    tiles: Float[Array, "n tiles m d"]  # queries: m is all heads of the KV head, at some positions
    places: Int[Array, "tiles m"]
    keys: Float[Array, "n s d"]  # keys and values are padded to whole blocks
    values: Float[Array, "n s d"]
    start: Int[Array, " n"]
    window: int | None
    cap: float | None


class _Tile(NamedTuple):
    q: Float[Array, "m d"]
    places: Int[Array, " m"]


def _attend(
    prior: PriorRows | None,
    window: int | None,
    cap: float | None,
    together: bool,
    q: Array,
    keys: Array,
    values: Array,
) -> ChunkAttention:
    b, c, h, d = q.shape
    k = keys.shape[2]
    tile = _tile(b, c, h, k, together)
    tiles = _tiles(q, k, tile)
    places = jnp.arange(tiles.shape[1] * tile, dtype=jnp.int32).reshape(-1, tile)
    start = jnp.zeros(b, jnp.int32) if prior is None else prior.start
    places = jnp.tile(places, h // k)
    rows = _columns(keys), _columns(values)
    chunk = _Chunk(tiles, places, *rows, jnp.repeat(start, k), window, cap)
    state = (_attend_together if together else _attend_in_turn)(prior, chunk)
    output = (state.weighted / state.total[..., None]).astype(q.dtype)
    log_sum = (state.peak + jnp.log(state.total))[..., None]
    return ChunkAttention(_untiled(output, q.shape), _untiled(log_sum, (b, c, h, 1))[..., 0])


def _tile(b: int, c: int, h: int, k: int, together: bool) -> int:
    if together:
        most = max(64, DEVICE_TILE_BYTES // (4 * b * h * BLOCK))
        return min(c, 1 << most.bit_length() - 1)
    count = -(-c // max(1, CPU_TILE * k // h))
    return -(-c // count)


def _tiles(q: Float[Array, "b c h d"], kv_heads: int, tile: int) -> Float[Array, "n tiles m d"]:
    """Arrange queries by KV head of each sequence, and tile; m is query heads times queries."""
    b, c, h, d = q.shape
    count = -(-c // tile)
    q = jnp.pad(q, ((0, 0), (0, count * tile - c), (0, 0), (0, 0)))
    q = q.reshape(b, count, tile, kv_heads, h // kv_heads, d).transpose(0, 3, 1, 4, 2, 5)
    return q.reshape(b * kv_heads, count, -1, d)


def _untiled(x: Float[Array, "n tiles m d"], shape: tuple[int, ...]) -> Float[Array, "b c h d"]:
    b, c, h, d = shape
    k = x.shape[0] // b
    x = x.reshape(b, k, x.shape[1], h // k, -1, d).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(b, -1, h, d)[:, :c]


def _columns(x: Float[Array, "b c k d"]) -> Float[Array, "n s d"]:
    """Pad a chunk's keys or values to whole blocks."""
    b, c, k, d = x.shape
    size = min(DIAGONAL_BLOCK, c)
    x = jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, -c % size), (0, 0)))
    return x.reshape(b * k, -1, d)


def _attend_in_turn(prior: PriorRows | None, chunk: _Chunk) -> Softmax:
    """Attend tile by tile, each to all its keys."""

    def attend_head(inputs: tuple[Array, ...]) -> Softmax:
        head, tiles, keys, values, start = inputs

        def attend_tile(tile: _Tile) -> Softmax:
            state = _attend_diagonal(chunk, tile, keys, values)
            return state if prior is None else _attend_prior(prior, chunk, state, tile, head, start)

        return lax.map(attend_tile, _Tile(tiles, chunk.places))

    heads = jnp.arange(len(chunk.tiles), dtype=jnp.int32)
    return lax.map(attend_head, (heads, chunk.tiles, chunk.keys, chunk.values, chunk.start))


def _attend_prior(
    prior: PriorRows,
    chunk: _Chunk,
    state: Softmax,
    tile: _Tile,
    head: Int[Array, ""],
    start: Int[Array, ""],
) -> Softmax:
    """Attend with a tile to all blocks before the chunk."""

    def visit_whole(number: Array, state: Softmax) -> Softmax:
        keys, values = (x.reshape(-1, *x.shape[2:])[head] for x in prior.rows(number))
        return _update(state, tile.q, keys, values, None, chunk.cap)

    def visit(number: Array, state: Softmax) -> Softmax:
        keys, values, positions = (x[head] for x in _heads(prior.block(number)))
        return _attend_block(chunk, state, tile, start, keys, values, positions)

    whole = prior.whole_blocks if chunk.window is None else jnp.int32(0)
    state = lax.fori_loop(jnp.int32(0), whole, visit_whole, state)
    return lax.fori_loop(whole, prior.blocks, visit, state)


def _attend_together(prior: PriorRows | None, chunk: _Chunk) -> Softmax:
    """Attend block by block with all tiles, while the next block is read."""

    def attend_diagonal(tiles: Array, keys: Array, values: Array) -> Softmax:
        inputs = _Tile(tiles, chunk.places)
        return lax.map(lambda tile: _attend_diagonal(chunk, tile, keys, values), inputs)

    state = jax.vmap(attend_diagonal)(chunk.tiles, chunk.keys, chunk.values)
    if prior is None:
        return state
    read = prior.block

    def update(
        state: Softmax, tiles: Array, start: Array, keys: Array, values: Array, positions: Array
    ) -> Softmax:
        def attend(inputs: tuple[Softmax, _Tile]) -> Softmax:
            state, tile = inputs
            return _attend_block(chunk, state, tile, start, keys, values, positions)

        return lax.map(attend, (state, _Tile(tiles, chunk.places)))

    def visit(number: Array, carry: tuple[Softmax, Block]) -> tuple[Softmax, Block]:
        state, block = carry
        following = read(number + 1)
        return jax.vmap(update)(state, chunk.tiles, chunk.start, *_heads(block)), following

    first = jnp.int32(0)
    return lax.fori_loop(first, prior.blocks, visit, (state, read(first)))[0]


def _heads(block: Block) -> tuple[Array, Array, Array]:
    """Return keys and values [n, s, d] and positions [n, s]."""
    b, k, s, d = block.keys.shape
    positions = jnp.broadcast_to(block.positions[:, None], (b, k, s)).reshape(b * k, s)
    return block.keys.reshape(b * k, s, d), block.values.reshape(b * k, s, d), positions


def _attend_diagonal(
    chunk: _Chunk, tile: _Tile, keys: Float[Array, "s d"], values: Float[Array, "s d"]
) -> Softmax:
    """Attend with a tile to the chunk's own keys that are visible to it."""
    size, window = min(DIAGONAL_BLOCK, keys.shape[0]), chunk.window
    column = jnp.arange(size, dtype=jnp.int32)[None]

    def visit(j: Array, state: Softmax) -> Softmax:
        block = [lax.dynamic_slice_in_dim(x, j * size, size) for x in (keys, values)]
        distance = tile.places[:, None] - (column + j * size)
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        return _update(state, tile.q, block[0], block[1], visible, chunk.cap)

    begin, end = jnp.int32(0), jnp.minimum(tile.places[-1] // size + 1, keys.shape[0] // size)
    if window is not None:
        begin = jnp.maximum(tile.places[0] - window + 1, 0) // size
    return lax.fori_loop(begin, end, visit, start_softmax(tile.q))


def _attend_block(
    chunk: _Chunk,
    state: Softmax,
    tile: _Tile,
    start: Int[Array, ""],
    keys: Float[Array, "s d"],
    values: Float[Array, "s d"],
    positions: Int[Array, " s"],
) -> Softmax:
    """Attend with a tile to a block before the chunk; invalid rows have position NOWHERE."""
    visible = (positions < NOWHERE)[None]
    if chunk.window is not None:
        visible &= (start + tile.places)[:, None] - positions[None] < chunk.window
    return _update(state, tile.q, keys, values, visible, chunk.cap)


def _update(
    state: Softmax,
    q: Float[Array, "m d"],
    keys: Float[Array, "s d"],
    values: Float[Array, "s d"],
    visible: Bool[Array, "#m s"] | None,
    cap: float | None,
) -> Softmax:
    """Attend to further keys; all of them if `visible` is None.

    Masked keys get weight only in a tile without a visible key so far; the first one scales that
    weight to exactly 0.
    """
    scores = jnp.einsum("md,sd->ms", q, keys, preferred_element_type=jnp.float32)
    scores = soft_capped(scores, cap)
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    peak = jnp.maximum(state.peak, jnp.max(scores, axis=-1))
    kept = jnp.exp(state.peak - peak)
    weights = jnp.exp(scores - peak[:, None])
    added = jnp.einsum(
        "ms,sd->md", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    total = state.total * kept + jnp.sum(weights, axis=-1)
    return Softmax(peak, total, state.weighted * kept[:, None] + added)


def attention_mass(
    q: Float[Array, "b c h d"],
    keys: Float[Array, "b c k d"],
    log_sum: Float[Array, "b c h"],
    span: Span,
    prior: PriorRows,
    cap: float | None = None,
) -> Float[Array, "b k t"]:
    """Return the attention weight of each slot, summed over queries and query heads of a KV head.

    The chunk's queries are scaled and rotated, its keys rotated. Requires slot = position. This is
    a second pass over all keys, with the known softmax sums.
    """
    position = span.positions(q.shape[1])
    # An infinite log-sum gives padding a weight of exactly 0.
    log_sum = jnp.where(span.holds(q.shape[1])[..., None], log_sum, jnp.inf)
    queries = (q, log_sum, position)

    def visit(number: Array, total: Array) -> Array:
        block = prior.block(number)
        weights = _weights_of_keys(queries, block.keys, block.positions, cap)
        previous = lax.dynamic_slice_in_dim(total, block.at, prior.size, axis=2)
        return lax.dynamic_update_slice_in_dim(total, previous + weights, block.at, axis=2)

    b, k = q.shape[0], keys.shape[2]
    total = jnp.zeros((b, k, prior.capacity), jnp.float32)
    total = lax.fori_loop(jnp.int32(0), prior.blocks, visit, total)
    chunk_weights = _weights_of_keys(queries, keys.swapaxes(1, 2), position, cap)
    return by_head(total, position[:, None]).add(chunk_weights, mode="drop")


def _weights_of_keys(
    queries: tuple[Array, Array, Array],
    keys: Float[Array, "b k n d"],
    slots: Int[Array, "b n"],
    cap: float | None,
) -> Float[Array, "b k n"]:
    """Return the weights that keys in given slots receive from (queries, log-sums, positions)."""
    b, k, n, _ = keys.shape
    c = queries[0].shape[1]
    size = min(MASS_QUERIES, c)

    def tiles(x: Array, padding: float) -> Array:
        widths = [(0, 0), (0, -c % size)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, widths, constant_values=padding)
        return x.reshape(b, -1, size, *x.shape[2:]).swapaxes(0, 1)

    def add(total: Array, tile: tuple[Array, Array, Array]) -> tuple[Array, None]:
        q, log_sum, position = tile
        q = q.reshape(b, size, k, -1, q.shape[-1])
        log_sum = log_sum.reshape(b, size, k, -1).transpose(0, 2, 3, 1)[..., None]
        scores = jnp.einsum("bqkgd,bknd->bkgqn", q, keys, preferred_element_type=jnp.float32)
        visible = (slots[:, None] <= position[:, :, None])[:, None, None]
        weights = jnp.where(visible, jnp.exp(soft_capped(scores, cap) - log_sum), 0.0)
        return total + jnp.sum(weights, axis=(2, 3)), None

    padding = (0.0, jnp.inf, 0.0)
    q, log_sum, position = (tiles(x, p) for x, p in zip(queries, padding, strict=True))
    return lax.scan(add, jnp.zeros((b, k, n), jnp.float32), (q, log_sum, position))[0]
