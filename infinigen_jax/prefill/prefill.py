"""Prefill: read prompts, or add tokens to an existing cache, chunk by chunk and layer by layer.

    for each chunk          the same compiled functions for all of them
        for each layer      attention over the chunk itself and over all prior rows, which
                            come from the host block by block; then its rows are stored
    predict                 logits after the last token of each sequence

For any prompt length the device holds one chunk's activations and a few blocks of rows, in addition
to device caches and policy state.

`prefill` creates a cache. `extend` adds tokens to a cache, also after decoding: a chat's next turn,
or different continuations of a shared prompt. Sequences may differ in length and may add no tokens;
the result of one does not depend on the others (see `ops.span`). A host pool is filled in one piece
and cannot be extended, because the rows that it dropped are gone.

With exact rows the result equals that of one piece except for rounding. With int8 or int4 rows a
chunk attends to prior rows in their stored form, scaled by the sequence's first chunk; their chunk
length is therefore fixed, independent of the longest sequence. Every policy attends to all rows
during prefill.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import Placement, allocate_host
from infinigen_jax.cache.layers import DenseLayer
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Weights
from infinigen_jax.decode.steps import bring, flush_cache, host_numbers, steps
from infinigen_jax.errors import InputError
from infinigen_jax.ops.span import Span
from infinigen_jax.prefill import compiled as programs
from infinigen_jax.settings.engine import CHUNK_UNIT
from infinigen_jax.transfer.host_weights import in_host_memory, merged

CHUNK = 1024  # most tokens of a sequence in a chunk on the CPU
LONG_CHUNK = 4096  # most tokens elsewhere: rows cross the bus, and more queries share them

Notify = Callable[[int, int], None]  # (tokens read of the longest sequence, its length)
# Arguments: stage, its output [b, c, e], each sequence's first position and number of tokens.
Look = Callable[[int, Array, Array, Array], None]


class Prefilled(NamedTuple):
    """Result of a prefill; `best` are the most likely next tokens, not in the cache."""

    cache: Cache
    logits: Float[Array, "b v"]
    best: Int[Array, " b"]


def prefill(
    decoder: Decoder,
    weights: Weights,
    prompts: Int[np.ndarray | Array, "b s"],
    lengths: Int[np.ndarray | Array, " b"],
    capacity: int,
    slots: int | None = None,
    chunk: int | None = None,
    notify: Notify | None = None,
    look: Look | None = None,
) -> Prefilled:
    """Process the prompts.

    Args:
        prompts: token ids, padded on the right.
        lengths: tokens of each prompt, at least 1.
        capacity: tokens per sequence that the cache has room for; at least s.
        slots: slots of the host cache, for a decoder with a pool; else `capacity`.
        chunk: most tokens of a sequence in a chunk; by default `longest_chunk`.
        notify: called after each chunk, if there are several.
        look: called with every stage's output for every chunk, see `decode.finite_check.Places`.
    """
    cache = empty_cache(decoder, prompts.shape[0], capacity, slots, lengths=lengths)
    return _read(decoder, weights, cache, prompts, lengths, chunk, notify, look)


def extend(
    decoder: Decoder,
    weights: Weights,
    cache: Cache,
    tokens: Int[np.ndarray | Array, "b s"],
    counts: Int[np.ndarray | Array, " b"],
    chunk: int | None = None,
    notify: Notify | None = None,
    look: Look | None = None,
) -> Prefilled:
    """Add tokens to the sequences of a cache; all rows are on the host afterwards.

    Args:
        cache: from `prefill`, `extend` or decode steps; its arrays are donated. Each sequence's
            length plus count must be at most its capacity.
        tokens: token ids, padded on the right.
        counts: tokens that each sequence gets. A sequence with none is unchanged, and its next
            token is meaningless.
    """
    if decoder.pool is not None:
        raise InputError("a cache with a limit cannot be extended; leave the pool out")
    cache = flush_cache(decoder, weights, cache)  # the rings may hold rows of the last steps
    return _read(decoder, weights, cache, tokens, counts, chunk, notify, look)


def longest_chunk(decoder: Decoder, batch: int) -> int:
    """Return the default maximum number of tokens of each sequence in a chunk."""
    if decoder.transfer.in_place:
        return CHUNK
    return max(CHUNK, LONG_CHUNK // max(1, batch // 2))


def chunk_length(tokens: int, most: int) -> int:
    """Return the length of chunks: as equal as possible, a multiple of CHUNK_UNIT, or `most`."""
    chunks = -(-tokens // most)
    unit = CHUNK_UNIT if tokens <= 512 else 2 * CHUNK_UNIT
    return min(-(-tokens // (chunks * unit)) * unit, most)


def chunk_for(decoder: Decoder, batch: int, tokens: int, most: int | None) -> int:
    """Return the length of chunks of `batch` sequences, whose longest has `tokens` tokens.

    The cuts affect only the scales of quantised rows and attention to them. Such rows are cut at
    the same places for any lengths.
    """
    if decoder.pool is not None:
        most = tokens + 2 * CHUNK_UNIT
    most = most or longest_chunk(decoder, batch)
    if tokens > most and not decoder.row_format.exact:
        return most
    return chunk_length(tokens, most)


def empty_cache(
    decoder: Decoder,
    batch: int,
    capacity: int,
    slots: int | None = None,
    host: Array | None = None,
    lengths: Int[np.ndarray | Array, " b"] | None = None,
) -> Cache:
    """Return a cache without tokens, in the `host` array of an unused equal cache if given.

    A pool needs the `lengths` of the prompts that fill it.
    """
    slots = capacity if slots is None else slots
    if decoder.host_layers and host is None:
        stored = decoder.row_format
        shape = (decoder.host_layers, batch, decoder.config.num_kv_heads, slots, stored.width)
        host = allocate_host(shape, stored.storage, decoder.mesh)
    placed = None
    if decoder.pool is not None:
        placed = jax.device_put(np.asarray(lengths, np.int32), Placement(decoder.mesh).batch)
    cache = programs.empty(decoder, placed, batch=batch, capacity=capacity, slots=slots)
    return cache._replace(host=host)


def _read(
    decoder: Decoder,
    weights: Weights,
    cache: Cache,
    tokens: Int[np.ndarray | Array, "b s"],
    counts: Int[np.ndarray | Array, " b"],
    chunk: int | None,
    notify: Notify | None,
    look: Look | None,
) -> Prefilled:
    """Add tokens to a cache whose rows are all on the host."""
    tokens, counts = np.asarray(tokens), np.asarray(counts)
    longest = int(counts.max())
    # The slots of the smallest cache that is neither ring nor pool.
    room = [x.keys.shape[2] for x in cache.local if isinstance(x, DenseLayer)]
    if cache.host is not None and decoder.pool is None:
        room.append(cache.host.shape[3])
    size = chunk_for(decoder, len(tokens), longest, chunk)
    size = min(size, min(room, default=decoder.config.max_positions))
    tokens = np.pad(tokens[:, :longest], ((0, 0), (0, -longest % size)))
    lengths = jax.device_put(np.asarray(cache.lengths) + counts, Placement(decoder.mesh).batch)
    last = None
    for begin in range(0, longest, size):
        count, piece = np.clip(counts - begin, 0, size), tokens[:, begin : begin + size]
        cache, last = read_chunk(decoder, weights, cache, piece, count, lengths, last, look)
        if notify is not None and longest > size:
            last.block_until_ready()
            notify(min(begin + size, longest), longest)
    logits, best, _ = steps(decoder).predict(weights.params["embedding"], last, cache.lengths)
    return Prefilled(cache, logits, best)


def read_chunk(
    decoder: Decoder,
    weights: Weights,
    cache: Cache,
    tokens: Int[np.ndarray, "b c"],
    counts: Int[np.ndarray, " b"],
    lengths: Int[Array, " b"],
    last: Float[Array, "b e"] | None = None,
    look: Look | None = None,
) -> tuple[Cache, Float[Array, "b e"]]:
    """Add one chunk to a cache whose rows are all on the host, without waiting.

    Return the cache, and the last layer's output for the last token of each sequence so far.

    Args:
        cache: cache that is extended; its arrays are donated.
        tokens: the chunk's tokens, padded on the right; each sequence has `counts` of them.
        lengths: length of each sequence after its last chunk.
        last: this output in the chunk before; None for the first chunk.
    """
    chunks, at = decoder.of_chunks, Placement(decoder.mesh)
    if last is None:
        zeros = np.zeros((len(tokens), decoder.config.hidden_size), decoder.dtype)
        last = jax.device_put(zeros, at.batch)
    span = Span(cache.lengths, jax.device_put(counts.astype(np.int32), at.batch))
    placed, size = jax.device_put(tokens, at.batch), tokens.shape[1]
    x = programs.embed(chunks, weights.params["embedding"], placed, span, size=size)

    def compute(params: Any, x: Array, local: Any, hosted: Any, *others: Any, **static: Any) -> Any:
        local = None if hosted else local  # rings differ by policy; the programs do not
        return programs.read_layer(chunks, params, x, local, hosted, *others, **static)

    store = RowStore(decoder, weights, cache)
    layers = through_layers(compute, decoder, weights, store, x, look, span, lengths)
    for i, output, rows, observations in layers:
        x = output
        store.keep(i, rows, span, observations)
        del rows, observations  # so that the next layer is computed without them
    newest, ends = programs.last_outputs(chunks, x, span, last)
    return store.cache()._replace(lengths=ends), newest


class RowStore:
    """Cache whose layers get the rows of a chunk one after the other; its arrays are donated."""

    def __init__(self, decoder: Decoder, weights: Weights, cache: Cache):
        self._decoder, self._policy, self._cache = decoder, weights.policy, cache
        self.host = cache.host
        self.local, self.states = list(cache.local), list(cache.states)
        self.scales = list(cache.scales)

    def hosted(self, number: int) -> programs.Hosted:
        """Return the rows of a host layer."""
        assert self.host is not None
        return self.host, host_numbers(self._decoder)[number], self.scales[number]

    def keep(self, layer: int, rows: Array, span: Span, observations: Any) -> None:
        """Store a layer's rows; see `compiled.keep`."""
        decoder, number = self._decoder, self._decoder.host_number(layer)
        if number < 0:
            chunks, local = decoder.of_chunks, self.local[layer]
            self.local[layer] = programs.keep_on_device(chunks, local, rows, span)
            return
        pool = self._cache.pool[number] if self._cache.pool else None
        new = programs.keep(
            decoder,
            *(self._policy[number], rows, span),
            *(self.local[layer], self.states[number], self.scales[number], self.host),  # donated
            *(host_numbers(decoder)[number], observations, pool),
            streams=decoder.streams(number),
        )
        self.local[layer], self.states[number], self.scales[number], self.host = new

    def cache(self) -> Cache:
        """Return the cache with all rows; its lengths are the old ones."""
        layers = {"local": tuple(self.local), "states": tuple(self.states)}
        return self._cache._replace(host=self.host, scales=tuple(self.scales), **layers)


def through_layers(
    compute: Callable[..., Any],
    decoder: Decoder,
    weights: Weights,
    store: RowStore,
    x: Array,
    look: Look | None,
    span: Span,
    *others: Array,
) -> Iterator[tuple[int, Array, Array, Any]]:
    """Compute all layers in turn; yield number, output, rows and observations of each.

    Weights in host memory arrive during the layer before. `compute` has the results of
    `compiled.read_layer`, and its parameters after the decoder up to `stored`; then come `span` and
    `others`. A layer's rows may be stored before the next one is computed, by another program: in
    one program XLA would copy the whole cache between reading prior rows and writing new ones.
    """
    layers, upcoming = weights.params["layers"], None
    look = look or (lambda stage, x, start, count: None)
    look(0, x, *span)
    for i, params in enumerate(layers):
        stored = tuple(layers[i + 1 : i + 2]) if decoder.weights_on_host else ()
        if upcoming is None and decoder.weights_on_host:
            upcoming, x = bring(decoder.of_chunks, in_host_memory(params), x)
        params = merged(params, upcoming)
        number, window = decoder.host_number(i), decoder.config.window_of(i)
        observed = number >= 0 and decoder.policy.observes and not decoder.streams(number)
        cached = store.local[i], store.hosted(number) if number >= 0 else None
        x, rows, *seen, upcoming = compute(
            params, x, *cached, stored, span, *others, window=window, observed=observed
        )
        look(i + 1, x, *span)
        yield i, x, rows, tuple(seen) if observed else None
        del rows, seen
