"""Compiled functions of prefill: of the cache, and of one layer over a chunk of a prompt.

Those of the cache, up to `keep`, depend on the policy, and donate what they replace. Those of a
chunk, from `embed` to `last_outputs`, are equal for all policies: call them with a decoder's
`of_chunks`. The functions after them are what programs of a layer are made of.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.cache import Cache, cache_shardings
from infinigen_jax.cache.host_array import capacity_of, read_block, write_span
from infinigen_jax.cache.layers import (
    DenseLayer,
    Local,
    Resident,
    Sliding,
    storage_error,
    sums_of_values,
)
from infinigen_jax.cache.pool import Hot, first_used, held, of_prompt
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.compiler_options import chunk_options
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.errors import ParameterError
from infinigen_jax.models import Params
from infinigen_jax.models.llama import Layer
from infinigen_jax.ops.bit_storage import from_kept
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill.attention import attend_chunk, attention_mass
from infinigen_jax.prefill.prior_rows import BLOCK, ChunkAttention, PriorRows
from infinigen_jax.transfer.host_weights import await_copy, start_next

Attend = Callable[[Array, Array, Array], ChunkAttention]  # queries, keys and values of a chunk
# Rows of a layer on the host: the host array, the layer's index there, and the rows' scales.
Hosted = tuple[Shaped[Array, "l a k t w"], Int[Array, ""], Any]


@compiled(cache_shardings, static_argnames=("batch", "capacity", "slots"))
def empty(
    decoder: Decoder,
    lengths: Int[Array, " b"] | None = None,
    *,
    batch: int,
    capacity: int,
    slots: int,
) -> Cache:
    """Return a cache without tokens and host array, with pools for prompts of these `lengths`."""
    config, policy, stored = decoder.config, decoder.policy, decoder.row_format
    k, limit = config.num_kv_heads, decoder.pool
    streams = [decoder.streams(i) for i in range(decoder.host_layers)]
    pool: Any = ()
    if limit is not None:
        assert lengths is not None
        pool = (of_prompt(limit, lengths, k, slots, policy.sinks),) * len(streams)

    def local(layer: int) -> Local:
        number, ring = decoder.host_number(layer), decoder.ring_size(layer, capacity)
        k, d = config.of(layer).num_kv_heads, config.of(layer).head_dim
        if number >= 0:
            blocks = 0
            if policy.has_tail and not streams[number]:
                blocks = 1 if limit is not None else decoder.slots.blocks(slots)
            return Resident.empty(batch, k, d, decoder.slots, decoder.dtype, blocks)
        kind, shape = DenseLayer if ring is None else Sliding, (batch, k, ring or capacity, d)
        return kind(*(jnp.zeros(shape, decoder.kept_dtype) for _ in range(2)))

    def state() -> Any:
        arrays = policy.init(config, batch, slots)
        for shape in map(jnp.shape, jax.tree.leaves(arrays)):
            if shape[:2] != (batch, k):
                problem = f"`init` returned an array of shape {shape}; give [{batch}, {k}, ...]"
                raise ParameterError("policy", problem, policy.name)
        return arrays

    def hot() -> Hot:
        used = None if limit is None else first_used(limit, pool[0])
        return Hot(used, decoder.empty_hot_set(batch, slots))

    return Cache(
        None,
        tuple(() if s else state() for s in streams),
        tuple(local(i) for i in range(config.num_layers)),
        jnp.zeros(batch, jnp.int32),
        tuple(stored.no_scales(batch, k) for _ in streams),
        tuple(Hot() if s else hot() for s in streams),
        pool,
    )


@compiled(
    lambda at: (at.rows, at.rows, at.rows, at.host),
    static_argnames="streams",
    donate_argnums=(3, 4, 5, 6),
)
def keep(
    decoder: Decoder,
    policy_weights: Params,
    rows: Float[Array, "b k c w"],
    span: Span,
    local: Resident,
    state: Any,
    scales: Any,
    host: Shaped[Array, "l a k t w2"],
    number: Int[Array, ""],
    observations: Any = None,
    pool: Int[Array, "b k t"] | None = None,
    *,
    streams: bool,
) -> tuple[Resident, Any, Any, Shaped[Array, "l a k t w2"]]:
    """Store a chunk's rows of a layer on the host.

    Args:
        rows: keys and values, concatenated, in the model's dtype.
        number: index among the host layers.
        observations: queries, and attention received by the slots, for a policy that observes.
        pool: with a pool, positions of the rows that its slots store; the chunk is then a whole
            prompt. None for slot = position.

    Returns:
        The new `local` (device rows), `state` (policy), `scales` (of the stored rows) and `host`.
    """
    stored = decoder.row_format
    local = local.extend(rows, span, decoder.slots, decoder.summed(policy_weights))
    chunk = span  # positions; with a pool the stored rows are elsewhere
    fitted, first = stored.fit(rows, span.count), (span.start == 0) & (span.count > 0)
    first = first[:, None, None]
    scales = jax.tree.map(lambda new, old: jnp.where(first, new, old), fitted, scales)
    if pool is not None:
        pool = pool[:, :, : rows.shape[2]]
        rows = jnp.take_along_axis(rows, jnp.maximum(pool, 0)[..., None], axis=2)
        span = Span.whole(rows.shape[0], rows.shape[2])
    encoded = stored.encode(scales, rows)
    if pool is not None and local.left is not None:
        # Resident rows enter the sum later, in their original form.
        left = sums_of_values(rows, held(pool, chunk.end - 1, decoder.policy.window) >= 0)
        left += storage_error(stored, scales, encoded, rows, pool >= 0)
        local = local._replace(left=left)
    if not streams:
        keys = rows[..., : decoder.config.head_dim]
        state = decoder.policy.append(policy_weights, state, keys, span)
    if observations is not None:
        queries, attention = observations  # the latter by position
        attention = attention if pool is None else None
        state = decoder.policy.observe_queries(state, queries, attention, chunk)
    host = write_span(host, number, encoded, span, decoder.mesh)
    return local, state, scales, host


@compiled(lambda at: at.batch, static_argnames="size")
def embed(
    decoder: Decoder, params: Params, tokens: Int[Array, "b n"], span: Span, *, size: int
) -> Float[Array, "b c e"]:
    """Return the input of the layers for the first `size` tokens; negative ones are padding."""
    tokens = jnp.maximum(tokens[:, :size], 0)
    # Padding may lie beyond the last position, where an embedding table would give NaN.
    last = decoder.config.max_positions - 1
    positions = jnp.minimum(span.positions(size), last)
    return decoder.blueprint.embedding(params).embed(tokens, positions)


@compiled(
    lambda at: (at.batch, at.rows, at.batch, at.rows, at.whole),
    chunk_options,
    static_argnames=("window", "observed"),
    donate_argnums=1,
)
def read_layer(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "b c e"],
    local: DenseLayer | Sliding | None,
    hosted: Hosted | None,
    stored: tuple[Params, ...],
    span: Span,
    lengths: Int[Array, " b"],
    *,
    window: int | None = None,
    observed: bool = False,
) -> tuple[Array, Array, Array | None, Array | None, Any]:
    """Return a layer's output and its rows, and with `observed` queries and received attention.

    The layer's earlier rows are on the device (`local`) or on the host. The last result is the next
    layer's weights on the device, if they were passed in host memory as `stored` (see
    `transfer.host_weights`); else None.
    """
    upcoming, x = start_next(stored, x)
    if hosted is None:
        assert local is not None
        prior = device_rows(local, span, decoder.dtype)
    else:
        prior = host_rows(decoder, *hosted, span)
    cap, positions = decoder.config.attention_softcap, span.positions(x.shape[1])
    whole = jnp.broadcast_to(lengths[:, None], positions.shape)

    def attend(queries: Array, keys: Array, values: Array) -> ChunkAttention:
        return attend_chunk(queries, keys, values, prior, window, cap)

    done = layer_over(decoder.blueprint.layer(params), x, positions, whole, attend)
    upcoming, x = await_copy(upcoming, done.x)
    if not observed:
        return x, done.rows, None, None, upcoming
    mass = attention_mass(done.queries, done.keys, done.attended.log_sum, span, prior, cap)
    return x, done.rows, done.queries, mass, upcoming


@compiled(lambda at: at.rows, donate_argnums=0)
def keep_on_device(
    decoder: Decoder, local: DenseLayer | Sliding, rows: Array, span: Span
) -> DenseLayer | Sliding:
    return local.extend(rows, span)


@compiled(lambda at: (at.batch, at.batch))
def last_outputs(
    decoder: Decoder, x: Float[Array, "b c e"], span: Span, before: Float[Array, "b e"]
) -> tuple[Float[Array, "b e"], Int[Array, " b"]]:
    """Return the output of each sequence's last token so far, and the new lengths."""
    place = jnp.maximum(span.count - 1, 0)[:, None, None]
    rows = jnp.take_along_axis(x, place, axis=1)[:, 0]
    return jnp.where(span.count[:, None] > 0, rows, before), span.end


class Done(NamedTuple):
    """Result of a layer over a chunk: queries are scaled and rotated, keys rotated."""

    x: Float[Array, "b c e"]
    rows: Float[Array, "b k c w"]
    queries: Float[Array, "b c h d"]
    keys: Float[Array, "b c k d"]
    attended: ChunkAttention


def layer_over(
    layer: Layer,
    x: Float[Array, "b c e"],
    positions: Int[Array, "b c"],
    lengths: Int[Array, "b c"],  # by token, of its sequence in the same call of the model
    attend: Attend,
) -> Done:
    """Compute one layer over a chunk with a given attention."""
    a = layer.attention_input(x)
    keys, values = layer.key_value(a, positions, lengths)
    queries = layer.query(a, positions, lengths)
    with jax.named_scope("attention"):
        attended = attend(queries, keys, values)
    x = x + layer.attention_output(attended.output, a)
    x = layer.after_mlp(x, a)
    rows = jnp.concatenate([keys, values], axis=-1).swapaxes(1, 2)
    return Done(x, rows, queries, keys, attended)


def device_rows(local: DenseLayer | Sliding, span: Span, dtype: Any) -> PriorRows:
    """Return the rows before a chunk of a layer whose cache is on the device."""
    capacity = local.keys.shape[2]

    def read(at: Array, size: int) -> tuple[Array, Array]:
        rows = (jax.lax.dynamic_slice_in_dim(x, at, size, axis=2) for x in local)
        keys, values = (from_kept(x, dtype) for x in rows)
        return keys, values

    ring = isinstance(local, Sliding)
    positions = local.slots.positions(span.start - 1) if ring else None
    return PriorRows(read, min(BLOCK, capacity), capacity, span.start, positions)


def host_rows(
    decoder: Decoder, host: Shaped[Array, "l a k t w"], number: Array, scales: Any, span: Span
) -> PriorRows:
    """Return a host layer's rows before a chunk."""
    batch = span.start.shape[0]
    capacity = capacity_of(host, batch)

    def read(at: Array, size: int) -> tuple[Array, Array]:
        stored = read_block(host, number, at, size, decoder.mesh, batch)
        keys, values = jnp.split(decoder.row_format.decode(scales, stored), 2, axis=-1)
        return keys, values

    return PriorRows(read, min(BLOCK, capacity), capacity, span.start, side_by_side=True)
