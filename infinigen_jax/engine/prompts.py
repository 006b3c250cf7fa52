"""Prefill of a run's prompts: cache sizes, shared prefixes and tokens cached before."""

import bisect
import dataclasses
import logging
import numbers
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from infinigen_jax.cache.cache import Cache
from infinigen_jax.decode.finite_check import Places, refuse
from infinigen_jax.decode.layer_rows import STREAM_BLOCK
from infinigen_jax.engine.draft_length import DraftLength
from infinigen_jax.engine.memory_plan import MemoryPlan, Shortage, plan_cache, shortage
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.engine.shared_prefix import broadcast, choose_sharing, common_prefix, may_share
from infinigen_jax.engine.workspace import prefill_bytes, step_bytes
from infinigen_jax.errors import ParameterError
from infinigen_jax.models import ModelConfig
from infinigen_jax.prefill.prefill import Notify, Prefilled, chunk_for, extend, prefill

logger = logging.getLogger("infinigen_jax")

FILLED = 0.9  # share of free memory used if the caller does not choose a batch size
CONTEXT = 4096  # default size of a context in tokens, if the model has that many positions


class Begun(NamedTuple):
    """Cache that a run continues with, and the number of tokens drawn before.

    Attributes:
        cache: the cache, whose arrays are donated; None if empty.
        cached: number of leading tokens of each prompt that are cached, fewer than all.
        length: measurements of earlier rounds of a lossless conversation.
    """

    cache: Cache | None
    cached: list[int]
    drawn: int = 0
    length: DraftLength | None = None

    @classmethod
    def empty(cls, batch: int) -> "Begun":
        return cls(None, [0] * batch)


class PromptReader:
    """Reader that prefills prompts into caches with room for their answers.

    Attributes:
        capacity: maximum number of tokens of a sequence in a device layer.
        slots: maximum number of rows of a sequence on the host; `capacity` without a pool.
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
        self._runtime, self._params = runtime, runtime.weights.params
        self._prompts = prompts
        self._sharing = None
        self._longest = max(map(len, prompts))
        prefix = min(prefix, common_prefix(prompts))
        if prefix and may_share(runtime.model.config, self._longest):
            self._sharing = choose_sharing(self.decoder, prefix, tokens, batch)
            capacity = self._sharing.capacity
        # A flush writes a whole window.
        self.capacity = capacity or round_up_capacity(max(tokens, self.decoder.policy.window))
        self.slots = self.decoder.host_slots(tokens, self.capacity)
        self._prefix: Cache | None = None

    @property
    def shared(self) -> int:
        """Number of tokens of the prefix that is read and stored once."""
        return 0 if self._sharing is None else self._sharing.tokens

    def phases(self, batch: int, cached: int, *, waiting: bool) -> list[MemoryPlan]:
        """Return the memory of each phase: prefill, decoding, prefill of waiting prompts."""
        together, one = self.cache_plan(batch), self.cache_plan(1)
        rest, plans = self._longest - cached - self.shared, []
        if self.shared:
            plans = [one.at_work(self._read_bytes(1, self.shared)), together + one]
        if self.shared and waiting:  # the cache of the prefix is kept
            together += one
        plans += [
            together.at_work(self._read_bytes(batch, rest)),
            together.at_work(self._step_bytes(batch)),
        ]
        if waiting:
            plans.append((together + one).at_work(self._read_bytes(1, rest)))
        return plans

    def cache_plan(self, batch: int) -> MemoryPlan:
        """Return the memory of a batch's cache."""
        plan = plan_cache(self.decoder, batch, self.capacity, self.slots)
        if self._sharing is None:
            return plan
        slots = self._sharing.host_sequences(batch) * self._sharing.unshared
        host = plan.host_cache // (batch * self.capacity) * slots
        return dataclasses.replace(plan, host_cache=host)

    def _read_bytes(self, batch: int, longest: int) -> int:
        chunk = self.chunk_length(longest, batch)
        return prefill_bytes(self.decoder, self._params, batch, chunk, self.capacity)

    def _step_bytes(self, batch: int) -> int:
        drafted, resident = self._runtime.draft_room, self.cache_plan(batch).resident
        sizes = batch, self.capacity, drafted, resident, self.slots
        return step_bytes(self.decoder, self._params, *sizes)

    def chunk_length(self, longest: int, batch: int) -> int:
        """Return the prefill chunk length for `batch` prompts of at most `longest` tokens."""
        limit = self._runtime.prefill_chunk
        return min(chunk_for(self.decoder, batch, longest, limit), self.capacity)

    def read_prefix(self, notify: Notify | None) -> None:
        """Read the shared prefix, if any, which `read` continues from."""
        if self._sharing is not None:
            prefix = [self._prompts[0][: self._sharing.tokens]]
            self._prefix = self._read(prefix, [0], Begun.empty(1), notify).cache

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
            assert self._sharing is not None
            cache = broadcast(self.decoder, self._prefix, len(numbers), self._sharing)
            begun = Begun(cache, [self._sharing.tokens] * len(numbers))
            if last:
                self._prefix = None
        begun = begun or Begun.empty(len(numbers))
        return self._read([self._prompts[i] for i in numbers], numbers, begun, notify)

    def _read(
        self,
        prompts: list[list[int]],
        numbers: Sequence[int],
        begun: Begun,
        notify: Notify | None,
    ) -> Prefilled:
        """Process the tokens of prompts that are not cached."""
        rest = [prompt[n:] for prompt, n in zip(prompts, begun.cached, strict=True)]
        lengths = np.array([len(prompt) for prompt in rest], np.int32)
        tokens = np.zeros((len(rest), int(lengths.max())), np.int32)
        for padded, prompt in zip(tokens, rest, strict=True):
            padded[: len(prompt)] = prompt
        self.tokens_read += int(lengths.sum())
        runtime, weights = self._runtime, self._runtime.weights
        places = Places(self.decoder, weights.params["embedding"], len(prompts))
        chunk = runtime.prefill_chunk
        look = places if runtime.settings.check else None
        if begun.cache is None:
            inputs = (self.decoder, weights, tokens, lengths, self.capacity)
            outcome = prefill(*inputs, self.slots, chunk, notify, look)
        else:
            inputs = (self.decoder, weights, begun.cache, tokens, lengths)
            outcome = extend(*inputs, chunk, notify, look)
        refuse([places.place], self.decoder.config.num_layers, numbers)
        return outcome


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


def round_up_capacity(tokens: int) -> int:
    """Round a capacity up to a multiple of a block, so that few programs are compiled."""
    unit = 128 if tokens <= STREAM_BLOCK else STREAM_BLOCK
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
