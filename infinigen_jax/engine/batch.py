"""A batch between decode steps: dispatch, flushes, and sequences that change hands.

    sequence   0          1      2           an index into every array of the cache
    state      running    idle   running     an idle sequence has at most a window of tokens

A new prompt is prefilled alone, into a cache of one sequence, which then replaces an idle sequence.
Shapes never change, so the compiled programs are reused. Sequences may differ in length: every
`window` steps a flush writes the last `window` rows of each, so every row is on the host before it
leaves the ring, regardless of when its sequence began.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from infinigen_jax.cache.cache import Cache, cache_shardings
from infinigen_jax.cache.host_array import Placement, read_sequence, shared_slots, write_block
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.layer_rows import STREAM_BLOCK
from infinigen_jax.decode.state import Counts
from infinigen_jax.decode.steps import Watch, flush_cache, host_numbers, single_layers, step, steps
from infinigen_jax.engine.runtime import Runtime


class Stepped(NamedTuple):
    """Result of a decode step; `logits` and `best` are of the next tokens.

    `place` is the first value that is not finite, if checked; see `decode.finite_check`.
    """

    cache: Cache
    logits: Float[Array, "b v"]
    best: Int[Array, " b"]
    counts: Counts
    place: Sequence[Array] = ()
    records: tuple[Any, ...] = ()


class Dispatcher:
    """Dispatch of compiled decode steps, in either schedule, without waiting for the device.

    For `exceeded` see `Layout`.
    """

    def __init__(self, runtime: Runtime, exceeded: int = 0, *, drafts: bool = False):
        decoder, self.weights = runtime.decoder, runtime.weights
        if drafts:
            decoder, self.weights = runtime.drafter
        self.decoder = dataclasses.replace(decoder, exceeded=exceeded)
        self._steps, self._numbers = steps(self.decoder), host_numbers(self.decoder)
        self._check = runtime.settings.check
        self._layerwise = runtime.settings.schedule == "layerwise" and not self._check

    def step(self, cache: Cache, tokens: Int[Array, " b"], watch: Watch | None = None) -> Stepped:
        """Dispatch a step over the next token of each sequence.

        The arrays of `cache` that the step replaces are donated. `watch` is called between the
        layers' programs; the step then uses the layerwise schedule, with equal results.
        """
        with jax.transfer_guard("disallow"):
            arguments = (self.weights, *cache.parts(self.decoder.policy.observes), tokens)
            if not self._layerwise and watch is None:
                fused = self._steps.checked if self._check else self._steps.fused
                new, logits, best, counts, *place = fused(*arguments)
                return Stepped(cache.stepped(new), logits, best, counts, place)
            pieces = self._steps.pieces
            if watch is not None:
                pieces = pieces._replace(groups=single_layers(self.decoder))
            common = self.decoder, pieces, self._numbers
            x, new, counts, records = step(*common, *arguments, watch)
            embedding = self.weights.params["embedding"]
            logits, best, lengths = self._steps.predict(embedding, x, new.lengths)
            cache = cache.stepped(new._replace(lengths=lengths))
            return Stepped(cache, logits, best, counts, records=records)


class Batch(abc.ABC):
    """Sequences that are decoded together.

    A step replaces `cache`, and is donated its arrays. `cached`, [b], are the tokens in it after
    all dispatched steps; the array is never changed in place. For `exceeded` see `Layout`: the
    decoder of `dispatcher` has it, the batch's `decoder` has not.
    """

    cache: Cache

    def __init__(self, runtime: Runtime, cached: np.ndarray, exceeded: int = 0):
        self.runtime, self.decoder, self.cached = runtime, runtime.decoder, cached
        self.exceeded = exceeded
        self.dispatcher, self._at = Dispatcher(runtime, exceeded), Placement(runtime.mesh)
        self._since_flush, self._left = 0, False

    @property
    @abc.abstractmethod
    def idle(self) -> np.ndarray:
        """Mask of the idle sequences, [b]."""

    @property
    def can_join(self) -> bool:
        """Whether a prompt may replace an idle sequence now.

        If a flush evicts rows or fills pages, all sequences must be at the same step of the window.
        Between lossless rounds this holds, as every row is on the host.
        """
        policy = self.decoder.policy
        at_flush = policy.paged or self.decoder.pool is not None
        return not at_flush or self._since_flush in (0, policy.window) or bool(self.idle.all())

    def settle(self) -> None:
        """Write all cached rows to the host."""
        self.cache = flush_cache(self.decoder, self.runtime.weights, self.cache)
        self._since_flush = 0

    def _step(self, tokens: Int[Array, " b"], watch: Watch | None = None) -> Stepped:
        """Dispatch a step over the next token of each sequence; see `Dispatcher.step`."""
        due = self._since_flush == self.decoder.policy.window
        if due or self._left:
            self.rest()
        if due:
            self.settle()
        stepped = self.dispatcher.step(self.cache, tokens, watch)
        self.cache, self.cached = stepped.cache, self.cached + 1
        self._since_flush += 1
        return stepped

    def _insert(self, sequence: int, one: Cache, tokens: int, others: Any, new: Any) -> Any:
        """Replace an idle sequence by that of the cache `one`, with `tokens` tokens.

        Return `others`, a tree of further arrays of the batch, with those of the sequence, `new`.
        """
        if self.idle.all():
            self._since_flush = 0
        given = self.cache, others, one, new, np.int32(sequence)
        self.cache, others = insert(self.decoder, *given)
        self.cached = np.where(np.arange(len(self.cached)) == sequence, tokens, self.cached)
        return others

    def rest(self) -> None:
        """Set the lengths of idle sequences to 0: they fetch nothing and never fill the cache."""
        idle = jax.device_put(self.idle, self._at.batch)
        self.cache = self.cache._replace(lengths=_rest(self.decoder, self.cache.lengths, idle))
        self.cached, self._left = np.where(self.idle, 0, self.cached), False


@compiled(lambda at: (cache_shardings(at), at.batch), donate_argnums=0)
def insert(
    decoder: Decoder, cache: Cache, others: Any, one: Cache, new: Any, sequence: Int[Array, ""]
) -> tuple[Cache, Any]:
    """Replace a sequence, also in other arrays, by that of a cache of the same capacity."""
    host = cache.host
    if host is not None:
        assert one.host is not None
        count = one.lengths[0] - shared_slots(one.host, 1)
        zero = jnp.int32(0)
        host = copy_slots(decoder, host, sequence, one.host, zero, zero, count)
    rest = put_sequence(cache._replace(host=None), one._replace(host=None), sequence)
    return rest._replace(host=host), put_sequence(others, new, sequence)


@compiled(lambda at: (cache_shardings(at), at.batch), donate_argnums=0)
def extract(
    decoder: Decoder, host: Any, cache: Cache, others: Any, sequence: Int[Array, ""]
) -> tuple[Cache, Any]:
    """Copy a sequence into a cache of its own, whose `host` array is given and donated.

    All its rows are on the host and none are shared.
    """
    if host is not None:
        assert cache.host is not None
        zero, count = jnp.int32(0), cache.lengths[sequence]
        host = copy_slots(decoder, host, zero, cache.host, sequence, zero, count)
    rest = take_sequence(cache._replace(host=None), sequence)
    return rest._replace(host=host), take_sequence(others, sequence)


def take_sequence(batch: Any, sequence: Int[Array, ""]) -> Any:
    """Return a sequence of every array of a tree, as a batch of one."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, sequence, 1, 0), batch)


def put_sequence(batch: Any, one: Any, sequence: Int[Array, ""]) -> Any:
    """Replace a sequence in every array of a tree by the only one of another tree."""

    def put(x: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(x, new.astype(x.dtype), sequence, 0)

    return jax.tree.map(put, batch, one)


def copy_slots(
    decoder: Decoder,
    host: Shaped[Array, "l a k t w"],
    sequence: Int[Array, ""],
    source: Shaped[Array, "l n k s w"],
    row: Int[Array, ""],
    start: Int[Array, ""],
    count: Int[Array, ""],
) -> Shaped[Array, "l a k t w"]:
    """Copy the `count` slots from `start` of a row of `source` to the first ones of a sequence.

    The copy is made block by block, and one compiled program serves all counts. Later slots of the
    sequence are undefined afterwards.
    """
    layers, _, _, capacity, _ = host.shape
    block = min(capacity, STREAM_BLOCK)
    blocks = (jnp.minimum(count, capacity) + block - 1) // block

    def copy(i: Array, host: Array) -> Array:
        layer, place = i // blocks, jnp.minimum(i % blocks * block, capacity - block)
        rows = read_sequence(source, layer, row, start + place, block, decoder.mesh)
        # The barrier keeps the write's reshape from the copy to the device, which XLA refuses.
        rows = lax.optimization_barrier(rows)
        return write_block(host, layer, sequence, place, rows, decoder.mesh)

    return lax.fori_loop(jnp.int32(0), layers * blocks, copy, host)


@compiled(lambda at: at.batch)
def _rest(decoder: Decoder, lengths: Int[Array, " b"], idle: Bool[Array, " b"]) -> Int[Array, " b"]:
    return jnp.where(idle, 0, lengths)
