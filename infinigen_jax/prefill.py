"""Reading prompts, and adding tokens to a cache that has some: chunk by chunk, layer by layer.

    for each chunk          the same compiled functions for all of them
        for each layer      attention over the chunk itself, and over every row before it, which
                            comes from the host block by block; then its rows are kept
    draw                    from the last token of each sequence

The device holds one chunk's activations and a few blocks of rows, however long the prompt is (a
dense layer's cache and a policy's state besides, which are there to stay). A prompt of at most one
chunk is read in one piece.

`prefill` starts a cache; `extend` adds tokens to one that decoding may have gone on with, such as a
chat's next turn, or different ends of a prompt that they share. Sequences may have different
numbers of tokens, before and now, also none: what one gets does not depend on the others (see
`span`). A host pool is filled in one piece and cannot be extended: rows that it does not keep are
not there to be attended to.

With exact rows the result is that of one piece but for rounding. With rows in int8 or int4
a chunk attends to those before it as they are stored; how they are scaled is decided on the first
chunk of a sequence. Every policy attends to everything while it reads.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped, UInt

from infinigen_jax.cache import Cache, DenseLayer, Local, Resident, Sliding, sums_of_values
from infinigen_jax.decode import Decoder, Weights
from infinigen_jax.errors import InputError
from infinigen_jax.memory import Placement, allocate_host, read_block, write_span
from infinigen_jax.models import Params
from infinigen_jax.models.base import Layer
from infinigen_jax.pool import held
from infinigen_jax.pooled import start_kept, start_pool
from infinigen_jax.prompt_attention import BLOCK, Attended, Earlier, attend_chunk
from infinigen_jax.received import attention_received
from infinigen_jax.sampling import Sampling
from infinigen_jax.span import Span
from infinigen_jax.steps import steps
from infinigen_jax.weights import bring

CHUNK = 1024  # tokens of a sequence in a chunk, at most, on the CPU
CHUNK_UNIT = 64
LONG_CHUNK = 4096  # and elsewhere: rows come over the bus, and more queries share them

Notify = Callable[[int, int], None]  # tokens of the longest sequence read, and in all
# Given a stage, its output [b, c, e], and each sequence's first position and number of tokens.
Look = Callable[[int, Array, Array, Array], None]


class PrefillSteps(NamedTuple):
    """The compiled functions of reading; the cache arrays that they replace are donated."""

    empty: Any
    embed: Any
    device_layer: Any
    keep_on_device: Any
    host_layer: Any
    observed_layer: Any
    keep: Any
    last: Any
    pool: Any
    kept: Any
    draw: Any


def prefill(
    decoder: Decoder,
    weights: Weights,
    prompts: Int[np.ndarray | Array, "b s"],
    lengths: Int[np.ndarray | Array, " b"],
    capacity: int,
    sampling: Sampling,
    seed: UInt[Array, ""],
    slots: int | None = None,
    chunk: int | None = None,
    notify: Notify | None = None,
    look: Look | None = None,
) -> tuple[Cache, Int[Array, " b"]]:
    """Process the prompts and draw the first token of each.

    Args:
        prompts: token numbers, padded on the right.
        lengths: of the prompts, at least 1.
        capacity: tokens per sequence that the cache has room for; at least s.
        slots: of the host's cache, for a decoder with a pool; else as many as `capacity`.
        chunk: most tokens of a sequence in a chunk; by default `longest_chunk`.
        notify: called when a chunk is done, if there are several.
        look: called with every stage's output for every chunk, see `checking.Places`.

    Returns:
        The cache, and the drawn tokens (which are not in the cache yet).
    """
    batch = prompts.shape[0]
    cache = empty_cache(decoder, batch, capacity, slots)
    if cache.host is not None and decoder.pool is not None:
        cache = _with_pool(decoder, cache, np.asarray(lengths), prompts.shape[1])
    step = jax.device_put(np.zeros(batch, np.int32), Placement(decoder.mesh).batch)
    return _read(
        decoder, weights, cache, prompts, lengths, sampling, seed, step, chunk, notify, look
    )


def extend(
    decoder: Decoder,
    weights: Weights,
    cache: Cache,
    tokens: Int[np.ndarray | Array, "b s"],
    counts: Int[np.ndarray | Array, " b"],
    sampling: Sampling,
    seed: UInt[Array, ""],
    step: Int[Array, " b"],
    chunk: int | None = None,
    notify: Notify | None = None,
    look: Look | None = None,
) -> tuple[Cache, Int[Array, " b"]]:
    """Add tokens to the sequences of a cache, and draw the token behind each.

    Args:
        cache: from `prefill`, `extend` or decode steps; its arrays are donated. It must have room:
            a sequence's length and count together are at most its capacity.
        tokens: padded on the right.
        counts: how many of them each sequence gets. One with none stays as it is, and the token
            drawn for it means nothing.
        step: of the random numbers that tokens are drawn with: how many each sequence has drawn.
        chunk, notify, look: as in `prefill`.

    Returns:
        The cache, and the drawn tokens (which are not in the cache yet). Everything is on the host:
        the next flush is due `window` steps from here.

    Raises:
        InputError: for a decoder with a pool.
    """
    if decoder.pool is not None:
        raise InputError("a cache with a limit cannot be extended; leave out --pool-tokens")
    if cache.host is not None:  # rows of the last steps may be in the rings alone
        host, states = steps(decoder).flush(
            weights.policy, cache.local, cache.host, cache.states, cache.scales, cache.lengths
        )
        cache = cache._replace(host=host, states=states)
    return _read(decoder, weights, cache, tokens, counts, sampling, seed, step, chunk, notify, look)


def longest_chunk(batch: int) -> int:
    """Most tokens of each sequence in a chunk, unless the user says."""
    if jax.default_backend() == "cpu":
        return CHUNK
    return max(CHUNK, LONG_CHUNK // max(1, batch // 2))


def chunk_length(tokens: int, most: int) -> int:
    """The length of chunks: as equal as possible, a multiple of CHUNK_UNIT."""
    chunks = -(-tokens // most)
    unit = CHUNK_UNIT if tokens <= 512 else 2 * CHUNK_UNIT
    return min(-(-tokens // (chunks * unit)) * unit, max(most, CHUNK_UNIT))


def chunk_for(decoder: Decoder, batch: int, tokens: int, most: int | None) -> int:
    """The length of chunks of `batch` sequences, the longest of so many tokens."""
    if decoder.pool is not None:
        most = tokens + 2 * CHUNK_UNIT
    return chunk_length(tokens, most or longest_chunk(batch))


def empty_cache(decoder: Decoder, batch: int, capacity: int, slots: int | None = None) -> Cache:
    """A cache without tokens, with room for `capacity` of each sequence.

    Args:
        slots: of the host's cache, if it has a limit.
    """
    host, slots = None, capacity if slots is None else slots
    if decoder.host_layers:
        stored = decoder.row_format
        shape = (decoder.host_layers, batch, decoder.config.num_kv_heads, slots, stored.width)
        host = allocate_host(shape, stored.storage, decoder.mesh)
    cache = prefill_steps(decoder).empty(batch, capacity, slots)
    return cache._replace(host=host)


def _with_pool(decoder: Decoder, cache: Cache, lengths: np.ndarray, padded: int) -> Cache:
    """An empty cache, once it is decided which rows of these prompts its pools are to keep."""
    assert cache.host is not None
    run, at = prefill_steps(decoder), Placement(decoder.mesh)
    placed = jax.device_put(lengths.astype(np.int32), at.batch)
    pool = run.pool(placed, padded, cache.host.shape[3])
    streams = [decoder.streams(number) for number in range(decoder.host_layers)]
    return cache._replace(
        hot=tuple(None if s else run.kept(pool) for s in streams),
        pool=tuple(pool.copy() for _ in streams),
    )


def _read(
    decoder: Decoder,
    weights: Weights,
    cache: Cache,
    tokens: Int[np.ndarray | Array, "b s"],
    counts: Int[np.ndarray | Array, " b"],
    sampling: Sampling,
    seed: UInt[Array, ""],
    step: Int[Array, " b"],
    chunk: int | None,
    notify: Notify | None,
    look: Look | None,
) -> tuple[Cache, Int[Array, " b"]]:
    """Add tokens to a cache whose rows are all on the host."""
    run, at = prefill_steps(decoder), Placement(decoder.mesh)
    tokens, counts = np.asarray(tokens), np.asarray(counts)
    longest = int(counts.max())
    size = min(chunk_for(decoder, len(tokens), longest, chunk), _room(decoder, cache))
    tokens = np.pad(tokens[:, :longest], ((0, 0), (0, -longest % size)))
    nothing = np.zeros((len(tokens), decoder.config.hidden_size), decoder.dtype)
    last = jax.device_put(nothing, at.batch)
    lengths = jax.device_put(np.asarray(cache.lengths) + counts, at.batch)
    for begin in range(0, longest, size):
        count = np.clip(counts - begin, 0, size).astype(np.int32)
        span = Span(cache.lengths, jax.device_put(count, at.batch))
        piece = jax.device_put(tokens[:, begin : begin + size], at.batch)
        x = run.embed(weights.params["embedding"], piece, span)
        x, cache = _layers(decoder, weights, cache, x, span, lengths, look)
        last, done = run.last(x, span, last)
        cache = cache._replace(lengths=done)
        if notify is not None and longest > size:
            last.block_until_ready()
            notify(min(begin + size, longest), longest)
    return cache, run.draw(weights.params["embedding"], last, seed, step, sampling)


def _room(decoder: Decoder, cache: Cache) -> int:
    """Slots of the caches that are not rings or pools, which have room for any number of tokens."""
    room = [x.keys.shape[2] for x in cache.local if isinstance(x, DenseLayer)]
    if cache.host is not None and decoder.pool is None:
        room.append(cache.host.shape[3])
    return min(room, default=decoder.config.max_positions)


def _layers(
    decoder: Decoder,
    weights: Weights,
    cache: Cache,
    x: Array,
    span: Span,
    lengths: Int[Array, " b"],
    look: Look | None,
) -> tuple[Array, Cache]:
    """All layers over a chunk.

    Reading earlier rows and writing the chunk's are two programs: in one, XLA would copy the whole
    cache between them.
    """
    run, at, policy = prefill_steps(decoder), Placement(decoder.mesh), decoder.policy
    local, states, scales = list(cache.local), list(cache.states), list(cache.scales)
    host, look = cache.host, look or (lambda stage, x, start, count: None)
    look(0, x, *span)
    for i, params in enumerate(weights.params["layers"]):
        if decoder.weights_on_host:
            params, x = bring(decoder.mesh)(params, x)
        number = decoder.host_number(i)
        if number < 0:
            window = decoder.config.window_of(i)
            x, rows = run.device_layer(params, x, local[i], span, lengths, window=window)
            local[i] = run.keep_on_device(local[i], rows, span)
            look(i + 1, x, *span)
            continue
        streams, place = decoder.streams(number), jax.device_put(np.int32(number), at.whole)
        observed = policy.observes and not streams
        layer = run.observed_layer if observed else run.host_layer
        x, rows, seen = layer(params, x, scales[number], host, place, span, lengths)
        local[i], states[number], scales[number], host = run.keep(
            weights.policy[number],
            rows,
            span,
            local[i],
            states[number],
            scales[number],
            host,
            place,
            seen,
            cache.pool_of(number),
            streams=streams,
        )
        look(i + 1, x, *span)
    return x, cache._replace(
        host=host, local=tuple(local), states=tuple(states), scales=tuple(scales)
    )


@functools.lru_cache(maxsize=64)
def prefill_steps(decoder: Decoder) -> PrefillSteps:
    """Jit a decoder's functions for chunks."""
    config, policy, stored = decoder.config, decoder.policy, decoder.row_format

    def empty(batch: int, capacity: int, slots: int) -> Cache:
        k, d = config.num_kv_heads, config.head_dim
        streams = [decoder.streams(i) for i in range(decoder.host_layers)]

        def local(layer: int) -> Local:
            number, ring = decoder.host_number(layer), decoder.ring_size(layer, capacity)
            if number >= 0:
                sums = policy.has_tail and not streams[number]
                blocks = 0
                if sums:
                    blocks = 1 if decoder.pool is not None else decoder.slots.blocks(slots)
                return Resident.empty(batch, k, 2 * d, decoder.slots, decoder.dtype, blocks)
            kind = DenseLayer if ring is None else Sliding
            return kind.empty((batch, k, ring or capacity, d), decoder.dtype)

        return Cache(
            None,
            tuple(() if s else policy.init(config, batch, slots) for s in streams),
            tuple(local(i) for i in range(config.num_layers)),
            jnp.zeros(batch, jnp.int32),
            tuple(stored.no_scales(batch, k) for _ in streams),
            tuple(None if s else decoder.empty_hot_set(batch, slots) for s in streams),
        )

    def embed(params: Params, tokens: Int[Array, "b c"], span: Span) -> Float[Array, "b c e"]:
        # Padding may lie beyond the last position, for which a table would give NaN.
        positions = jnp.minimum(span.positions(tokens.shape[1]), config.max_positions - 1)
        return decoder.blueprint.embedding(params).embed(tokens, positions)

    def device_layer(
        params: Params,
        x: Float[Array, "b c e"],
        local: DenseLayer | Sliding,
        span: Span,
        lengths: Int[Array, " b"],
        window: int | None,
    ) -> tuple[Array, Array]:
        earlier = device_rows(local, span)
        layer = decoder.blueprint.layer(params)
        done = chunk_layer(layer, x, span, lengths, earlier, window)
        return done.x, done.rows

    def keep_on_device(
        local: DenseLayer | Sliding, rows: Float[Array, "b k c w"], span: Span
    ) -> DenseLayer | Sliding:
        return local.extend(rows, span)

    def host_layer(
        params: Params,
        x: Float[Array, "b c e"],
        scales: Any,
        host: Shaped[Array, "l b k t w"],
        number: Int[Array, ""],
        span: Span,
        lengths: Int[Array, " b"],
        observed: bool,
    ) -> tuple[Array, Array, Any]:
        earlier = host_rows(decoder, host, number, scales, span)
        done = chunk_layer(decoder.blueprint.layer(params), x, span, lengths, earlier)
        if not observed:
            return done.x, done.rows, None
        log_sum = done.attended.log_sum
        received = attention_received(done.queries, done.keys, log_sum, span, earlier)
        return done.x, done.rows, (done.queries, received)

    def last(
        x: Float[Array, "b c e"], span: Span, before: Float[Array, "b e"]
    ) -> tuple[Float[Array, "b e"], Int[Array, " b"]]:
        """The output for each sequence's last token so far, and the new lengths."""
        place = jnp.maximum(span.count - 1, 0)[:, None, None]
        rows = jnp.take_along_axis(x, place, axis=1)[:, 0]
        return jnp.where(span.count[:, None] > 0, rows, before), span.end

    def draw(
        params: Params,
        x: Float[Array, "b e"],
        seed: UInt[Array, ""],
        step: Int[Array, " b"],
        sampling: Sampling,
    ) -> Int[Array, " b"]:
        return decoder.draw(params, x, seed, step, sampling)

    at: Any = Placement(decoder.mesh)

    def on_host(observed: bool) -> Any:
        return jax.jit(
            functools.partial(host_layer, observed=observed),
            donate_argnums=1,
            out_shardings=(at.batch, at.rows, (at.batch, at.rows) if observed else None),
        )

    return PrefillSteps(
        empty=jax.jit(
            empty,
            static_argnums=(0, 1, 2),
            out_shardings=Cache(None, at.rows, at.rows, at.batch, at.rows, at.rows),
        ),
        embed=jax.jit(embed, out_shardings=at.batch),
        device_layer=jax.jit(
            device_layer,
            static_argnames="window",
            donate_argnums=1,
            out_shardings=(at.batch, at.rows),
        ),
        keep_on_device=jax.jit(keep_on_device, donate_argnums=0, out_shardings=at.rows),
        host_layer=on_host(observed=False),
        observed_layer=on_host(observed=True),
        keep=jax.jit(
            functools.partial(keep_rows, decoder),
            static_argnames="streams",
            donate_argnums=(3, 4, 5, 6),
            out_shardings=(at.rows, at.rows, at.rows, at.host),
        ),
        last=jax.jit(last, out_shardings=(at.batch, at.batch)),
        pool=jax.jit(
            functools.partial(start_pool, decoder), static_argnums=(1, 2), out_shardings=at.rows
        ),
        kept=jax.jit(functools.partial(start_kept, decoder), out_shardings=at.rows),
        draw=jax.jit(draw, static_argnames="sampling", out_shardings=at.batch),
    )


class Done(NamedTuple):
    """A layer over a chunk.

    Attributes:
        x: its output.
        rows: keys and values side by side.
        queries, keys: scaled and rotated.
    """

    x: Float[Array, "b c e"]
    rows: Float[Array, "b k c w"]
    queries: Float[Array, "b c h d"]
    keys: Float[Array, "b c k d"]
    attended: Attended


def chunk_layer(
    layer: Layer,
    x: Float[Array, "b c e"],
    span: Span,
    lengths: Int[Array, " b"] | None = None,
    earlier: Earlier | None = None,
    window: int | None = None,
) -> Done:
    """One layer over a chunk.

    Args:
        lengths: of the sequences when all that is being read is; the span's end by default.
        earlier: the rows before it; None if there are none.
        window: how many tokens a token attends to, if not all before it.
    """
    positions = span.positions(x.shape[1])
    whole = jnp.broadcast_to((span.end if lengths is None else lengths)[:, None], positions.shape)
    a = layer.attention_input(x)
    keys, values = layer.key_value(a, positions, whole)
    queries = layer.query(a, positions, whole)
    with jax.named_scope("attention"):
        attended = attend_chunk(queries, keys, values, earlier, window)
    x = x + layer.attention_output(attended.output)
    x = x + layer.mlp(x)
    rows = jnp.concatenate([keys, values], axis=-1).swapaxes(1, 2)
    return Done(x, rows, queries, keys, attended)


def device_rows(local: DenseLayer | Sliding, span: Span) -> Earlier:
    """The rows before a chunk of a layer whose cache is on the device."""
    capacity = local.keys.shape[2]

    def read(at: Array, size: int) -> tuple[Array, Array]:
        keys, values = (jax.lax.dynamic_slice_in_dim(x, at, size, axis=2) for x in local)
        return keys, values

    positions = None
    if isinstance(local, Sliding):
        positions = local.slots.positions(span.start - 1)
    return Earlier(read, min(BLOCK, capacity), capacity, span.start, positions)


def host_rows(
    decoder: Decoder, host: Shaped[Array, "l b k t w"], number: Array, scales: Any, span: Span
) -> Earlier:
    """A host layer's rows before a chunk."""
    capacity = host.shape[3]

    def read(at: Array, size: int) -> tuple[Array, Array]:
        stored = read_block(host, number, at, size, decoder.mesh)
        keys, values = jnp.split(decoder.row_format.decode(scales, stored), 2, axis=-1)
        return keys, values

    return Earlier(read, min(BLOCK, capacity), capacity, span.start)


def keep_rows(
    decoder: Decoder,
    policy_weights: Params,
    rows: Float[Array, "b k c w"],
    span: Span,
    local: Resident,
    state: Any,
    scales: Any,
    host: Shaped[Array, "l b k t w2"],
    number: Int[Array, ""],
    seen: Any = None,
    pool: Int[Array, "b k t"] | None = None,
    *,
    streams: bool,
) -> tuple[Resident, Any, Any, Shaped[Array, "l b k t w2"]]:
    """What a layer on the host keeps of a chunk's rows.

    Args:
        rows: keys and values side by side, in the model's dtype.
        number: of the layer, among those on the host.
        seen: queries, and attention that slots received, for a policy that observes.
        pool: positions of the rows that its slots are to hold, in place of slot = position; of a
            whole prompt.
        streams: nothing is selected for it.

    Returns:
        The replacements of `local`, `state`, `scales` and `host`: rows on the device, policy's
        state, scales of the stored rows, host cache.
    """
    stored = decoder.row_format
    local = local.extend(rows, span, decoder.slots)
    fitted, first = stored.fit(rows, span.count), (span.start == 0) & (span.count > 0)
    first = first[:, None, None]
    scales = jax.tree.map(lambda new, old: jnp.where(first, new, old), fitted, scales)
    if pool is not None:
        pool = pool[:, :, : rows.shape[2]]
        rows = jnp.take_along_axis(rows, jnp.maximum(pool, 0)[..., None], axis=2)
        if local.left is not None:
            there = held(pool, span.end - 1, decoder.policy.window) >= 0
            local = local._replace(left=sums_of_values(rows, there))
        span = Span.whole(rows.shape[0], rows.shape[2])
    if not streams:
        keys = rows[..., : decoder.config.head_dim]
        state = decoder.policy.append(policy_weights, state, keys, span)
    if seen is not None:
        queries, received = seen
        state = decoder.policy.observe_queries(state, queries, received, span)
    host = write_span(host, number, stored.encode(scales, rows), span, decoder.mesh)
    return local, state, scales, host
