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
chunk of a sequence: chunks are as long as they may be then, whatever the longest sequence. Every
policy attends to everything while it reads.
"""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Int, UInt

from infinigen_jax.cache.host_array import Placement, allocate_host
from infinigen_jax.cache.layers import Cache, DenseLayer
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Weights
from infinigen_jax.decode.steps import flush_cache
from infinigen_jax.errors import InputError
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill.compiled import prefill_steps
from infinigen_jax.sampling import Sampling
from infinigen_jax.transfer.host_weights import bring, merged

CHUNK = 1024  # tokens of a sequence in a chunk, at most, on the CPU
CHUNK_UNIT = 64
LONG_CHUNK = 4096  # and elsewhere: rows come over the bus, and more queries share them

Notify = Callable[[int, int], None]  # tokens of the longest sequence read, and in all
# Given a stage, its output [b, c, e], and each sequence's first position and number of tokens.
Look = Callable[[int, Array, Array, Array], None]


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
        cache = _with_pool(decoder, cache, np.asarray(lengths))
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
        numbers = [_number(decoder, i) for i in range(decoder.host_layers)]
        cache = flush_cache(decoder, weights, numbers, cache)
    return _read(decoder, weights, cache, tokens, counts, sampling, seed, step, chunk, notify, look)


def longest_chunk(decoder: Decoder, batch: int) -> int:
    """Most tokens of each sequence in a chunk, unless the user says."""
    if decoder.transfer.in_place:
        return CHUNK
    return max(CHUNK, LONG_CHUNK // max(1, batch // 2))


def chunk_length(tokens: int, most: int) -> int:
    """The length of chunks: as equal as possible, a multiple of CHUNK_UNIT."""
    chunks = -(-tokens // most)
    unit = CHUNK_UNIT if tokens <= 512 else 2 * CHUNK_UNIT
    return min(-(-tokens // (chunks * unit)) * unit, max(most, CHUNK_UNIT))


def chunk_for(decoder: Decoder, batch: int, tokens: int, most: int | None) -> int:
    """The length of chunks of `batch` sequences, the longest of so many tokens.

    Where a sequence is cut changes nothing but how small rows are scaled and attended to. Those are
    cut at the same places whatever the longest prompt beside them.
    """
    if decoder.pool is not None:
        most = tokens + 2 * CHUNK_UNIT
    most = most or longest_chunk(decoder, batch)
    if tokens > most and not decoder.row_format.exact:
        return max(most, CHUNK_UNIT)
    return chunk_length(tokens, most)


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
    cache = prefill_steps(decoder).empty(batch=batch, capacity=capacity, slots=slots)
    return cache._replace(host=host)


def _with_pool(decoder: Decoder, cache: Cache, lengths: np.ndarray) -> Cache:
    """An empty cache, once it is decided which rows of these prompts its pools are to keep."""
    assert cache.host is not None
    run, at = prefill_steps(decoder), Placement(decoder.mesh)
    placed = jax.device_put(lengths.astype(np.int32), at.batch)
    pool = run.pool(placed, slots=cache.host.shape[3])
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
    return cache, run.draw(weights.params["embedding"], last, seed, step, sampling=sampling)


def _number(decoder: Decoder, number: int) -> Int[Array, ""]:
    """The number of a host layer, on the device."""
    return jax.device_put(np.int32(number), Placement(decoder.mesh).whole)


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
    run, policy = prefill_steps(decoder), decoder.policy
    local, states, scales = list(cache.local), list(cache.states), list(cache.scales)
    host, look = cache.host, look or (lambda stage, x, start, count: None)
    look(0, x, *span)
    layers, coming = weights.params["layers"], None
    for i, params in enumerate(layers):
        stored = tuple(layers[i + 1 : i + 2]) if decoder.weights_on_host else ()
        if coming is not None:
            params = merged(params, coming)
        elif decoder.weights_on_host:
            params, x = bring(decoder.mesh, params, x)
        number = decoder.host_number(i)
        if number < 0:
            window = decoder.config.window_of(i)
            x, rows, coming = run.device_layer(
                params, x, local[i], span, lengths, stored, window=window
            )
            local[i] = run.keep_on_device(local[i], rows, span)
            look(i + 1, x, *span)
            continue
        streams, place = decoder.streams(number), _number(decoder, number)
        observed = policy.observes and not streams
        layer = run.observed_layer if observed else run.host_layer
        x, rows, seen, coming = layer(params, x, scales[number], host, place, span, lengths, stored)
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
