"""One layer over a chunk of a prompt: the rows it reads and the rows it stores."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from infinigen_jax.cache.host_array import capacity_of, read_block, write_span
from infinigen_jax.cache.layers import DenseLayer, Resident, Sliding, storage_error, sums_of_values
from infinigen_jax.cache.pool import held
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.models import Params
from infinigen_jax.models.llama import Layer
from infinigen_jax.ops.bit_storage import from_kept
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill.attention import attend_chunk
from infinigen_jax.prefill.prior_rows import BLOCK, ChunkAttention, PriorRows

Attend = Callable[[Array, Array, Array], ChunkAttention]  # queries, keys and values of a chunk


class Done(NamedTuple):
    """Result of a layer over a chunk: queries are scaled and rotated, keys rotated."""

    x: Float[Array, "b c e"]
    rows: Float[Array, "b k c w"]
    queries: Float[Array, "b c h d"]
    keys: Float[Array, "b c k d"]
    attended: ChunkAttention


def chunk_layer(
    layer: Layer,
    x: Float[Array, "b c e"],
    span: Span,
    lengths: Int[Array, " b"] | None = None,
    prior: PriorRows | None = None,
    window: int | None = None,
    cap: float | None = None,
) -> Done:
    """Compute a layer over a chunk; `lengths` after all chunks are by default the span's end."""
    positions = span.positions(x.shape[1])
    whole = jnp.broadcast_to((span.end if lengths is None else lengths)[:, None], positions.shape)

    def attend(queries: Array, keys: Array, values: Array) -> ChunkAttention:
        return attend_chunk(queries, keys, values, prior, window, cap)

    return layer_over(layer, x, positions, whole, attend)


def layer_over(
    layer: Layer,
    x: Float[Array, "b c e"],
    positions: Int[Array, "b c"],
    lengths: Int[Array, "b c"],
    attend: Attend,
) -> Done:
    """Compute one layer over a chunk with a given attention.

    `lengths` is, for each token, the length of its sequence in the same call of the model.
    """
    a = layer.attention_input(x)
    keys, values = layer.key_value(a, positions, lengths)
    queries = layer.query(a, positions, lengths)
    with jax.named_scope("attention"):
        attended = attend(queries, keys, values)
    x = x + layer.attention_output(attended.output)
    x = x + layer.mlp(x, a)
    rows = jnp.concatenate([keys, values], axis=-1).swapaxes(1, 2)
    return Done(x, rows, queries, keys, attended)


def device_rows(local: DenseLayer | Sliding, span: Span, dtype: Any) -> PriorRows:
    """Return the rows before a chunk of a layer whose cache is on the device."""
    capacity = local.keys.shape[2]

    def read(at: Array, size: int) -> tuple[Array, Array]:
        rows = (jax.lax.dynamic_slice_in_dim(x, at, size, axis=2) for x in local)
        keys, values = (from_kept(x, dtype) for x in rows)
        return keys, values

    positions = None
    if isinstance(local, Sliding):
        positions = local.slots.positions(span.start - 1)
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


def keep_rows(
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
        queries, attention = observations
        state = decoder.policy.observe_queries(state, queries, attention, chunk)
    host = write_span(host, number, encoded, span, decoder.mesh)
    return local, state, scales, host
