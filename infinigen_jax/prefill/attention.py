"""Attention of a chunk of a prompt over itself and over the rows before it.

The softmax is computed online, so the largest array is one tile of scores: some queries and all
query heads of a KV head, over one block of keys.

    CPU      one KV head of one sequence at a time, so that a tile stays in the processor's cache
             (the memory traffic of scores dominates)
    NVIDIA   in half precision, cuDNN's kernel: scores stay on chip (`prefill.cudnn_attention`)
    others   all heads together; the next block of prior rows is read during attention to the
             current one
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from infinigen_jax.ops.attention import MASKED, Softmax, soft_capped
from infinigen_jax.ops.reductions import best, summed
from infinigen_jax.prefill import cudnn_attention as fused_attention
from infinigen_jax.prefill.prior_rows import BLOCK, NOWHERE, Attended, Block, PriorRows

OWN_BLOCK = 256  # for the chunk's own keys; small, as blocks on the diagonal are half masked
CPU_TILE = 256  # rows of a tile: queries times query heads of a KV head
CPU_WIDE_TILE = 1024  # the same, for blocks of prior rows
DEVICE_TILE_BYTES = 1 << 26  # for all tiles processed together


def causal_attention(
    q: Float[Array, "b s h d"],
    keys: Float[Array, "b s k d"],
    values: Float[Array, "b s k d"],
    window: int | None = None,
) -> Float[Array, "b s h d"]:
    """Return causal attention over prompts padded on the right; query heads share KV heads.

    Padded positions affect only outputs at padded positions.

    Args:
        window: number of tokens, including itself, that a token attends to; None for all prior
            ones.
    """
    return attend_chunk(q, keys, values, window=window).output


def attend_chunk(
    q: Float[Array, "b c h d"],
    keys: Float[Array, "b c k d"],
    values: Float[Array, "b c k d"],
    prior: PriorRows | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> Attended:
    """Return causal attention of a chunk, over itself and over the rows before it.

    Args:
        q: scaled queries; query head h reads KV head h // (h / k).
        keys, values: keys and values of the chunk.
        prior: rows before the chunk; None for none.
        window: see `causal_attention`.
        cap: bound of the scores, see `ops.attention.soft_capped`.
    """
    cpu, default = (functools.partial(_attend, prior, window, cap, all) for all in (False, True))
    if cap is None and fused_attention.usable(q, keys.shape[2], prior, window):
        default = functools.partial(fused_attention.attend, prior, window)
    return lax.platform_dependent(q, keys, values, cpu=cpu, default=default)


def _attend(
    prior: PriorRows | None,
    window: int | None,
    cap: float | None,
    together: bool,
    q: Array,
    keys: Array,
    values: Array,
) -> Attended:
    b, c, h, d = q.shape
    k = keys.shape[2]
    tile = _tile(b, c, h, k, together)
    tiles = _tiles(q, k, tile)
    chunk_columns = (_columns(x) for x in (keys, values))
    attend_own = functools.partial(_attend_own, h // k, window, cap)
    state = _each(attend_own, together)((tiles, *chunk_columns))
    if prior is not None:
        first = _tile_positions(prior.start, k, tile, h // k, tiles.shape[1])
        state = _attend_prior(prior, window, cap, (tiles, first), state, together)
    output = (state.weighted / state.total[..., None]).astype(q.dtype)
    log_sum = (state.peak + jnp.log(state.total))[..., None]
    return Attended(_untiled(output, q.shape), _untiled(log_sum, (b, c, h, 1))[..., 0])


def _untiled(x: Float[Array, "n tiles m d"], shape: tuple[int, ...]) -> Float[Array, "b c h d"]:
    """Return the inverse of `_tiles`."""
    b, c, h, d = shape
    k = x.shape[0] // b
    x = x.reshape(b, k, x.shape[1], h // k, -1, d).transpose(0, 2, 4, 1, 3, 5)
    return x.reshape(b, -1, h, d)[:, :c]


def _tile(b: int, c: int, h: int, k: int, together: bool) -> int:
    """Return the number of queries in a tile."""
    if not together:
        return min(c, max(1, CPU_TILE * k // h))
    most = max(64, DEVICE_TILE_BYTES // (4 * b * h * BLOCK))
    return min(c, 1 << most.bit_length() - 1)


def _tiles(q: Float[Array, "b c h d"], kv_heads: int, tile: int) -> Float[Array, "n tiles m d"]:
    """Arrange queries by KV head of each sequence, and tile; m is query heads times queries."""
    b, c, h, d = q.shape
    count = -(-c // tile)
    q = jnp.pad(q, ((0, 0), (0, count * tile - c), (0, 0), (0, 0)))
    q = q.reshape(b, count, tile, kv_heads, h // kv_heads, d).transpose(0, 3, 1, 4, 2, 5)
    return q.reshape(b * kv_heads, count, -1, d)


def _columns(x: Float[Array, "b c k d"]) -> Float[Array, "n s d"]:
    """Return a chunk's keys or values, padded to whole blocks."""
    b, c, k, d = x.shape
    size = min(OWN_BLOCK, c)
    x = jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, -c % size), (0, 0)))
    return x.reshape(b * k, -1, d)


def _each(function: Callable[[Any], Any], together: bool) -> Callable[[Any], Any]:
    """Map a function of one KV head over all heads, vectorised or sequentially."""
    return jax.vmap(function) if together else functools.partial(lax.map, function)


def _tile_positions(
    start: Int[Array, " b"], kv_heads: int, tile: int, group: int, tiles: int
) -> Int[Array, "n tiles m"]:
    """Return the positions of the queries in `_tiles`."""
    place = jnp.arange(tiles * tile, dtype=jnp.int32).reshape(tiles, 1, tile)
    place = jnp.broadcast_to(place, (tiles, group, tile)).reshape(tiles, -1)
    return jnp.repeat(start, kv_heads)[:, None, None] + place[None]


def _attend_own(
    group: int, window: int | None, cap: float | None, head: tuple[Array, Array, Array]
) -> Softmax:
    """Attend with a head's tiles to the chunk's own keys that are visible to them."""
    tiles, keys, values = head
    count, m, d = tiles.shape
    tile = m // group
    size = min(OWN_BLOCK, keys.shape[0])
    row = jnp.tile(jnp.arange(tile, dtype=jnp.int32), group)[:, None]
    column = jnp.arange(size, dtype=jnp.int32)[None]

    def attend(inputs: tuple[Array, Array]) -> Softmax:
        number, q = inputs
        first = number * tile

        def visit(j: Array, state: Softmax) -> Softmax:
            block = [lax.dynamic_slice_in_dim(x, j * size, size) for x in (keys, values)]
            distance = row + first - (column + j * size)
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            return _update(state, q, block[0], block[1], visible, cap)

        visible_blocks = jnp.minimum((first + tile + size - 1) // size, keys.shape[0] // size)
        begin = jnp.int32(0)
        if window is not None:
            begin = jnp.maximum(first - window + 1, 0) // size
        return lax.fori_loop(begin, visible_blocks, visit, _empty_softmax(q))

    return lax.map(attend, (jnp.arange(count, dtype=jnp.int32), tiles))


def _attend_prior(
    prior: PriorRows,
    window: int | None,
    cap: float | None,
    queries: tuple[Float[Array, "n tiles m d"], Int[Array, "n tiles m"]],
    state: Softmax,
    together: bool,
) -> Softmax:
    """Attend to the blocks before the chunk as well; `queries` come with their positions."""
    narrow = queries[0].shape[1]
    wide = 1 if together else _widening(narrow, queries[0].shape[2])
    (tiles, rows), state = jax.tree.map(lambda x: _regrouped(x, narrow // wide), (queries, state))
    attend = _each(functools.partial(_attend_block, window, cap), together)

    def update(state: Softmax, block: Block) -> Softmax:
        return attend((state, tiles, rows, *_heads(block)))

    def visit(number: Array, state: Softmax) -> Softmax:
        return update(state, prior.block(number))

    def visit_ahead(number: Array, carry: tuple[Softmax, Block]) -> tuple[Softmax, Block]:
        state, block = carry
        following = prior.block(number + 1)  # read during attention to this block
        return update(state, block), following

    first = jnp.int32(0)
    if together:
        carry = (state, prior.block(first))
        state = lax.fori_loop(first, prior.blocks, visit_ahead, carry)[0]
    else:
        state = lax.fori_loop(first, prior.blocks, visit, state)
    return jax.tree.map(lambda x: _regrouped(x, narrow), state)


def _widening(tiles: int, rows: int) -> int:
    """Return the number of tiles in a wide tile, a divisor of their count."""
    return max(
        w for w in range(1, tiles + 1) if tiles % w == 0 and (w == 1 or w * rows <= CPU_WIDE_TILE)
    )


def _regrouped(x: Array, tiles: int) -> Array:
    """Regroup [n, tiles, rows, ...] into another number of tiles."""
    return x.reshape(x.shape[0], tiles, -1, *x.shape[3:])


def _heads(block: Block) -> tuple[Array, Array, Array]:
    """Return keys and values [n, s, d] and positions [n, s]."""
    b, k, s, d = block.keys.shape
    positions = jnp.broadcast_to(block.positions[:, None], (b, k, s)).reshape(b * k, s)
    return block.keys.reshape(b * k, s, d), block.values.reshape(b * k, s, d), positions


def _attend_block(
    window: int | None,
    cap: float | None,
    head: tuple[Softmax, Array, Array, Array, Array, Array],
) -> Softmax:
    """Attend with a head's tiles to one block."""
    state, tiles, rows, keys, values, columns = head

    def attend(inputs: tuple[Softmax, Array, Array]) -> Softmax:
        state, q, row = inputs
        visible = (columns < NOWHERE)[None]
        if window is not None:
            visible &= row[:, None] - columns[None] < window
        return _update(state, q, keys, values, visible, cap)

    return lax.map(attend, (state, tiles, rows))


def _empty_softmax(q: Float[Array, "m d"]) -> Softmax:
    zeros = jnp.zeros(q.shape, jnp.float32)
    return Softmax(jnp.full(q.shape[:-1], MASKED, jnp.float32), zeros[..., 0], zeros)


def _update(
    state: Softmax,
    q: Float[Array, "m d"],
    keys: Float[Array, "s d"],
    values: Float[Array, "s d"],
    visible: Array,
    cap: float | None,
) -> Softmax:
    """Attend to further keys.

    Masked keys get weight only in a tile that has seen no visible key yet. The first visible key
    scales that weight to exactly 0.
    """
    scores = jnp.einsum("md,sd->ms", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, soft_capped(scores, cap), MASKED)
    peak = jnp.maximum(state.peak, best(scores))
    kept = jnp.exp(state.peak - peak)
    weights = jnp.exp(scores - peak[:, None])
    added = jnp.einsum(
        "ms,sd->md", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    total = state.total * kept + summed(lambda x: x, weights)
    return Softmax(peak, total, state.weighted * kept[:, None] + added)
