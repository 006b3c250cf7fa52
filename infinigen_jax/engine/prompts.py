"""Prefill of a run's prompts: cache sizes, shared prefixes and tokens cached before.

A prefix that several prompts share is read once, and stored once on the host:

    prefix     | read alone, as a batch of one |
    sequence 0                                 | its own tokens |
    sequence 1                                 | its own tokens ....... |

Each sequence has its own copy of the device data: dense layers, the policy's state and recent rows.
On the host, the shared rows are stored once for the batch (see `cache.host_array`). The last rows
of the prefix, at least a window, are copied, as a flush may write them again.
"""

import bisect
import dataclasses
import logging
import numbers
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from infinigen_jax.cache.cache import Cache, cache_shardings
from infinigen_jax.cache.host_array import allocate_host
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.finite_check import Places, refuse
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.layer_rows import STREAM_BLOCK
from infinigen_jax.engine.batch import copy_slots
from infinigen_jax.engine.draft_length import DraftLength
from infinigen_jax.engine.memory_plan import (
    MemoryPlan,
    Shortage,
    plan_cache,
    prefill_bytes,
    shortage,
    step_bytes,
)
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.errors import ParameterError
from infinigen_jax.models import ModelConfig
from infinigen_jax.prefill.prefill import Notify, Prefilled, chunk_for, extend, prefill

logger = logging.getLogger("infinigen_jax")

FILLED = 0.9  # share of free memory used if the caller does not choose a batch size
CONTEXT = 4096  # default size of a context in tokens, if the model has that many positions
UNIT = 128  # the number of a sequence's unshared slots is a multiple of it


class Begun(NamedTuple):
    """Cache that a run continues with, and the number of tokens drawn before."""

    cache: Cache | None = None  # its arrays are donated; None if empty
    cached: int = 0  # number of leading tokens of every prompt that are cached, fewer than all
    drawn: int = 0
    length: DraftLength | None = None  # measurements of a lossless conversation's earlier rounds


class PromptReader:
    """Reader that prefills prompts into caches with room for their answers.

    Attributes:
        capacity: maximum number of tokens of a sequence in a device layer.
        slots: maximum number of rows of a sequence on the host; `capacity` without a pool.
        shared: number of tokens of the prefix that is read and stored once.
        tokens_read: prompt tokens processed so far, excluding cached ones.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompts: list[list[int]],
        tokens: int,
        batch: int,
        capacity: int | None,
        prefix: int,
    ):
        """Choose the cache sizes of a batch; the longest sequence and its answer have `tokens`."""
        self.decoder = runtime.decoder
        self.tokens_read = 0
        self._runtime, self._params, self._prompts = runtime, runtime.weights.params, prompts
        self._longest = max(map(len, prompts))
        prefix = min(prefix, common_prefix(prompts))
        if prefix and may_share(runtime.model.config, self._longest):
            self._sharing = choose_sharing(self.decoder, prefix, tokens, batch)
        else:
            self._sharing = Sharing(0, 0, capacity or capacity_for(self.decoder, tokens))
        self.shared, self.capacity = self._sharing.tokens, self._sharing.capacity
        self.slots = self.decoder.host_slots(tokens, self.capacity)
        self._prefix: Cache | None = None

    def phases(self, batch: int, cached: int, *, waiting: bool) -> list[MemoryPlan]:
        """Return the memory of each phase: prefill, decoding, prefill of waiting prompts."""
        together, one = self.cache_plan(batch), self.cache_plan(1)
        rest, plans = self._longest - cached - self.shared, []
        if self.shared:
            plans = [one.at_work(self._read_bytes(1, self.shared)), together + one]
        if self.shared and waiting:  # the cache of the prefix is kept
            together += one
        sizes = batch, self.capacity, self._runtime.draft_room, self.slots
        plans += [
            together.at_work(self._read_bytes(batch, rest)),
            together.at_work(step_bytes(self.decoder, self._params, *sizes)),
        ]
        if waiting:
            plans.append((together + one).at_work(self._read_bytes(1, rest)))
        return plans

    def cache_plan(self, batch: int) -> MemoryPlan:
        """Return the memory of a batch's cache."""
        plan = plan_cache(self.decoder, batch, self.capacity, self.slots)
        if not self.shared:
            return plan
        slots = self._sharing.host_sequences(batch) * self._sharing.unshared
        host = plan.host_cache // (batch * self.capacity) * slots
        return dataclasses.replace(plan, host_cache=host)

    def _read_bytes(self, batch: int, longest: int) -> int:
        chunk = self.chunk_length(longest, batch)
        return prefill_bytes(self.decoder, self._params, batch, chunk, self.capacity)

    def chunk_length(self, longest: int, batch: int) -> int:
        """Return the prefill chunk length for `batch` prompts of at most `longest` tokens."""
        limit = self._runtime.prefill_chunk
        return min(chunk_for(self.decoder, batch, longest, limit), self.capacity)

    def read_prefix(self, notify: Notify | None) -> None:
        """Read the shared prefix, if any, which `read` continues from."""
        if self.shared:
            prefix = [self._prompts[0][: self.shared]]
            self._prefix = self._read(prefix, [0], Begun(), notify).cache

    def read(
        self,
        numbers: Sequence[int],
        begun: Begun | None = None,
        notify: Notify | None = None,
        *,
        last: bool = False,
    ) -> Prefilled:
        """Read prompts, after `begun`, by default the shared prefix.

        The cache of the prefix is dropped if these are the `last` prompts.
        """
        if self._prefix is not None:
            cache = broadcast(self.decoder, self._prefix, len(numbers), self._sharing)
            begun = Begun(cache, self.shared)
            if last:
                self._prefix = None
        prompts = [self._prompts[i] for i in numbers]
        return self._read(prompts, numbers, begun or Begun(), notify)

    def _read(
        self, prompts: list[list[int]], numbers: Sequence[int], begun: Begun, notify: Notify | None
    ) -> Prefilled:
        """Process the tokens of prompts that are not cached."""
        rest = [prompt[begun.cached :] for prompt in prompts]
        lengths = np.array([len(prompt) for prompt in rest], np.int32)
        tokens = np.zeros((len(rest), int(lengths.max())), np.int32)
        for padded, prompt in zip(tokens, rest, strict=True):
            padded[: len(prompt)] = prompt
        self.tokens_read += int(lengths.sum())
        runtime, weights = self._runtime, self._runtime.weights
        places = Places(self.decoder, weights.params["embedding"], len(prompts))
        more = runtime.prefill_chunk, notify, places if runtime.settings.check else None
        if begun.cache is None:
            sizes = self.capacity, self.slots
            outcome = prefill(self.decoder, weights, tokens, lengths, *sizes, *more)
        else:
            outcome = extend(self.decoder, weights, begun.cache, tokens, lengths, *more)
        refuse([places.place], self.decoder.config.num_layers, numbers)
        return outcome


class Sharing(NamedTuple):
    """Layout of a shared prefix of `tokens` tokens in the host's array; 0 for no prefix.

    `sequences` of its sequences hold the shared slots; every sequence has `unshared` slots.
    """

    tokens: int
    sequences: int
    unshared: int

    @property
    def capacity(self) -> int:
        """Number of slots of each sequence, shared or not."""
        return (self.sequences + 1) * self.unshared

    def host_sequences(self, batch: int) -> int:
        """Return the number of sequences of the host's array for a batch size."""
        return batch + self.sequences


def common_prefix(prompts: Sequence[list[int]]) -> int:
    """Return the length of the common prefix of all prompts, less than the shortest prompt."""
    least = min(map(len, prompts)) - 1
    first, last = min(prompts), max(prompts)  # lexicographic order: all others lie between them
    return next((i for i in range(least) if first[i] != last[i]), least)


def may_share(config: ModelConfig, longest: int) -> bool:
    """Return whether the keys of a prefix are independent of the prompt's length, up to `longest`.

    They are not if the frequencies of the rotary embedding vary with the length.
    """
    rope = config.rope
    return rope is None or not rope.varies or longest <= rope.original_positions


def choose_sharing(decoder: Decoder, prefix: int, tokens: int, batch: int) -> Sharing:
    """Choose the layout with the fewest slots for sequences of up to `tokens` tokens."""
    if decoder.pool is not None:
        raise ParameterError("pool", "not with a shared prefix; leave one of them out")
    if decoder.mesh.shape["data"] > 1:
        raise ParameterError("prefix", "not for sequences on several devices; give whole prompts")
    slots = -(-max(tokens, decoder.policy.window) // UNIT) * UNIT
    choices = [Sharing(prefix, 0, slots)]
    for unshared in range(UNIT, slots, UNIT):
        sequences = max(0, prefix - decoder.policy.window) // unshared
        choices.append(Sharing(prefix, sequences, unshared))
    return min(
        (choice for choice in choices if choice.capacity >= slots),
        key=lambda choice: (choice.host_sequences(batch) * choice.unshared, choice.sequences),
    )


def broadcast(decoder: Decoder, one: Cache, batch: int, sharing: Sharing) -> Cache:
    """Return the cache of `batch` sequences with the prefix cached in `one`.

    `one` is a cache of a single sequence, with the capacity of `sharing`; not donated.
    """
    cache = _repeat(decoder, one._replace(host=None), batch=batch)
    if one.host is None:
        return cache
    layers, _, heads, _, width = one.host.shape
    sequences, slots = sharing.host_sequences(batch), sharing.unshared
    host = allocate_host((layers, sequences, heads, slots, width), one.host.dtype, decoder.mesh)
    # First slot of `one` that each sequence holds.
    starts = [sharing.sequences * slots] * batch
    starts += [i * slots for i in range(sharing.sequences)]
    for sequence, start in enumerate(starts):
        count = min(slots, sharing.tokens - start)
        at, zero, start, count = map(np.int32, (sequence, 0, start, count))
        host = _copy(decoder, host, at, one.host, zero, start, count)
    return cache._replace(host=host)


@compiled(cache_shardings, static_argnames="batch")
def _repeat(decoder: Decoder, one: Cache, *, batch: int) -> Cache:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])), one)


_copy = compiled(lambda at: at.host, donate_argnums=0)(copy_slots)


def checked_context(config: ModelConfig, context: int | None) -> int:
    """Return the maximum number of tokens, prompt and answer, of a text that grows step by step.

    `context` is the number asked for; by default 4096, or the model's limit if lower.
    """
    limit, why = config.longest_short or config.max_positions, "the model's positions"
    if limit < config.max_positions:
        why = "as the model rotates the keys of longer texts differently"
    if context is None:
        return min(CONTEXT, limit)
    if not isinstance(context, numbers.Integral) or not 1 < context <= limit:
        raise ParameterError("context", f"give 2 to {limit}, {why}", context)
    return int(context)


def capacity_for(decoder: Decoder, tokens: int) -> int:
    """Return the capacity of a cache for up to `tokens` tokens of each sequence.

    It is a multiple of a block, so that few programs are compiled.
    """
    tokens = max(tokens, decoder.policy.window)  # a flush writes a whole window
    unit = UNIT if tokens <= STREAM_BLOCK else STREAM_BLOCK
    return -(-tokens // unit) * unit


def batch_that_fits(
    runtime: Runtime, reader: Callable[[int], PromptReader], longest: int, most: int
) -> int:
    """Return the largest batch size that fits, at least 1; warn if it is less than `most`.

    If not all sequences fit, some memory is left free, as plans are estimates.
    """

    def lacks(batch: int, share: float = FILLED) -> Shortage | None:
        plans = reader(batch).phases(batch, 0, waiting=batch < most)
        return next(filter(None, (shortage(plan, runtime.device, share) for plan in plans)), None)

    lacking = lacks(most, 1.0)
    if lacking is None:
        return most
    if lacks(1, 1.0):
        return 1
    batch = 1 + bisect.bisect_left(range(2, most), True, key=lambda n: lacks(n) is not None)
    text = f"{batch} of {most} prompts at once"  # language: ignore
    text += ", as many as fit, and the others as these end"
    lengths = [reader(n).chunk_length(longest, n) for n in (batch, most)]
    if not runtime.decoder.row_format.exact and lengths[0] != lengths[1]:
        text += (
            f", read {lengths[0]} tokens at a time, which rows in {runtime.decoder.rows} depend on"
        )
    logger.warning("%s: all at once need %s", text, lacking.what)  # language: ignore
    return batch
