"""Batch for prompts that arrive at any time: sequences join and leave between decode steps.

A prompt is read in chunks of a few fixed lengths (`Reading`), so nothing is compiled after the
first use of each length. A sequence's result does not depend on the others; it may have a budget
of its own, and a heat map of the rows that it fetches.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from infinigen_jax.cache.cache import Cache
from infinigen_jax.cache.host_array import Placement, allocate_host, capacity_of
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Carry
from infinigen_jax.decode.steps import Watch, Watched, steps
from infinigen_jax.engine.batch import Batch, Stepped, extract
from infinigen_jax.engine.runtime import Runtime
from infinigen_jax.models import Params
from infinigen_jax.policies.base import Budgeted
from infinigen_jax.prefill.prefill import read_chunk
from infinigen_jax.selection.select import budget_fraction
from infinigen_jax.settings.engine import CHUNK_UNIT


class Single(NamedTuple):
    """A sequence outside of a batch, all of whose rows are on the host.

    `newest` and `room` are as in `OpenBatch`; only a `LosslessBatch` needs `room`. For `budget` see
    `SequenceBudgets.replace`.
    """

    cache: Cache
    tokens: int
    newest: Any
    budget: float | None = None
    room: int = 0


class Reading:
    """A prompt on its way into a cache of one sequence; each chunk replaces and donates the cache.

    Chunks end at multiples of `chunk` tokens, and at the prompt's end. Chunk boundaries therefore
    do not depend on the number of tokens that were cached before.
    """

    def __init__(
        self,
        runtime: Runtime,
        tokens: Sequence[int] | np.ndarray,
        cache: Cache,
        chunk: int,
        done: int = 0,
    ):
        """Prepare to read a prompt, whose first `done` tokens, fewer than all, are in the cache."""
        self.tokens, self.done = np.asarray(tokens, np.int32), done
        self._runtime, self._chunk = runtime, chunk
        self.cache = cache
        lengths = np.array([len(self.tokens)], np.int32)
        self._lengths = jax.device_put(lengths, Placement(runtime.mesh).batch)
        self._last: Float[Array, "1 e"] | None = None

    @property
    def complete(self) -> bool:
        return self.done == len(self.tokens)

    def advance(self) -> None:
        """Wait for the previous chunk, and dispatch the next one."""
        self.wait()
        end = min(self.done // self._chunk * self._chunk + self._chunk, len(self.tokens))
        count = end - self.done
        size = next(size for size in chunk_lengths(self._chunk) if size >= count)
        piece = np.zeros((1, size), np.int32)
        piece[0, :count] = self.tokens[self.done : end]
        common = self._runtime.decoder, self._runtime.weights, self.cache
        given = piece, np.array([count]), self._lengths, self._last
        self.cache, self._last = read_chunk(*common, *given)
        self.done = end

    @functools.cached_property
    def predicted(self) -> tuple[Float[Array, "1 v"], Int[Array, " 1"]]:
        """Logits of the first new token of a complete prompt, and the most likely token."""
        assert self.complete and self._last is not None
        embedding = self._runtime.weights.params["embedding"]
        predict = steps(self._runtime.decoder).predict
        return predict(embedding, self._last, self.cache.lengths)[:2]

    def single(self, newest: Any = None, budget: float | None = None, room: int = 0) -> Single:
        """Return the sequence of a complete prompt; `newest` is `predicted` by default."""
        newest = self.predicted if newest is None else newest
        return Single(self.cache, len(self.tokens), newest, budget, room)

    def wait(self) -> None:
        """Wait until the chunk in progress is computed."""
        if self._last is not None:
            self._last.block_until_ready()


def chunk_lengths(chunk: int) -> list[int]:
    """Return the lengths of compiled chunks: powers of two times CHUNK_UNIT, and `chunk`."""
    lengths = [min(CHUNK_UNIT, chunk)]
    while lengths[-1] < chunk:
        lengths.append(min(2 * lengths[-1], chunk))
    return lengths


def budget_limit(decoder: Decoder) -> float | None:
    """Return the policy's budget, the limit of a sequence's; None if they cannot differ."""
    policy = decoder.policy
    if not isinstance(policy, Budgeted) or policy.observes or not decoder.selecting:
        return None
    return policy.budget


class SequenceBudgets:
    """Budgets by sequence, at most the policy's. They are data, so that a change compiles nothing.

    `weights` are the policy's arrays with these budgets.
    """

    def __init__(self, runtime: Runtime, batch: int):
        self._decoder, self._most = runtime.decoder, budget_limit(runtime.decoder)
        self._policy = self.weights = runtime.weights.policy
        self._at = Placement(runtime.mesh).batch
        if self._most is not None:
            self._budgets = np.full(batch, self._most)
            self.weights = self._with_budgets()

    def replace(self, sequence: int, budget: float | None) -> None:
        """Set the budget of a sequence; None for the policy's."""
        budget = budget or self._most
        if budget is not None and budget != self._budgets[sequence]:
            self._budgets[sequence] = budget
            self.weights = self._with_budgets()

    def of(self, sequence: int) -> float | None:
        """Return the budget of a sequence; None if sequences cannot differ."""
        return None if self._most is None else float(self._budgets[sequence])

    def _with_budgets(self) -> tuple[Params, ...]:
        """Return the arrays; each layer's budget is scaled as the sequence's budget is."""
        assert self._most is not None
        layers, shares = list(self._policy), {}
        for number in self._decoder.selecting:
            budget = self._decoder.budgets.get(number, self._most)
            if budget not in shares:
                scaled = [budget_fraction(budget * (each / self._most)) for each in self._budgets]
                pairs = np.array([share.as_integer_ratio() for share in scaled], np.int32)
                shares[budget] = jax.device_put(pairs, self._at)
            layers[number] = layers[number] | {"share": shares[budget]}
        return tuple(layers)


class OpenBatch(Batch):
    """Batch of sequences that join and leave.

    A step or round costs about the same for any number of idle sequences. A sequence that is alone
    is therefore better decoded in a batch of one, which takes it over without a copy (`take`).
    """

    newest: Any  # arrays that each sequence continues from, in addition to the cache

    def __init__(self, runtime: Runtime, batch: int):
        super().__init__(runtime, np.zeros(batch, np.int32))
        self.budgets = SequenceBudgets(runtime, batch)
        self.active = np.zeros(batch, bool)  # sequences that are not idle
        # Maximum number of tokens that each sequence still gets, if known; 0 for idle ones.
        self.room = np.zeros(batch, np.int32)
        self.selecting = self.dispatcher  # of steps that select rows by the sequences' budgets

    @property
    def idle(self) -> np.ndarray:
        return ~self.active

    def join(self, sequence: int, single: Single) -> None:
        """Copy a sequence to the place of an idle one; it can join several times."""
        assert self.can_join and not self.active[sequence]
        arrays = single.tokens, self.newest, single.newest
        self.newest = self._insert(sequence, single.cache, *arrays)
        self._activate(sequence, single)

    def take(self, single: Single) -> None:
        """Take over the arrays of a sequence; for a batch of one."""
        assert len(self.active) == 1 and not self.active[0]
        self.cache, self.newest = single.cache, single.newest
        self.cached = np.array([single.tokens], np.int32)
        self._since_flush, self._left = 0, False
        self._activate(0, single)

    def release(self) -> Array | None:
        """Free the arrays of an idle batch of one, and return its host array; see `take`."""
        host = self.cache.host
        del self.cache, self.newest
        return host

    def _activate(self, sequence: int, single: Single) -> None:
        self.active[sequence], self.room[sequence] = True, single.room
        self.budgets.replace(sequence, single.budget)
        steps = self.selecting
        steps.weights = steps.weights._replace(policy=self.budgets.weights)

    def single(self, sequence: int, host: Array | None = None) -> Single:
        """Return an active sequence, to continue elsewhere; it leaves this batch. Needs `can_join`.

        A batch of one gives its own arrays away; a larger one copies the sequence out of them, into
        `host` if given (see `empty_cache`).
        """
        assert self.can_join and self.active[sequence]
        budget, tokens = self.budgets.of(sequence), int(self.cached[sequence])
        room = int(self.room[sequence])
        self.settle()
        cache, newest = self.cache, self.newest
        if len(self.active) > 1:
            if cache.host is not None and host is None:
                shape = (cache.host.shape[0], 1, *cache.host.shape[2:])
                host = allocate_host(shape, cache.host.dtype, self.runtime.mesh)
            cache, newest = extract(self.decoder, host, cache, newest, np.int32(sequence))
        self.leave(sequence)
        return Single(cache, tokens, newest, budget, room)

    def leave(self, sequence: int) -> None:
        self.active[sequence], self.room[sequence], self._left = False, 0, True


class LiveBatch(OpenBatch):
    """Batch that advances by decode steps.

    `newest` has the logits of each next token, [b, v] float32, and the most likely ones, [b].
    """

    def __init__(self, runtime: Runtime, batch: int):
        super().__init__(runtime, batch)
        vocabulary = runtime.decoder.config.vocab_size
        zeros = np.zeros((batch, vocabulary), np.float32), np.zeros(batch, np.int32)
        self.newest = jax.device_put(zeros, self._at.batch)

    @property
    def logits(self) -> Float[Array, "b v"]:
        return self.newest[0]

    @property
    def best(self) -> Int[Array, " b"]:
        return self.newest[1]

    def step(self, tokens: Int[Array, " b"], watch: Watch | None = None) -> Stepped:
        """Dispatch a decode step over the next token of each sequence, without waiting.

        An active sequence must have room for the token. Only the step's counts and records are the
        caller's: its other arrays belong to the batch.
        """
        stepped = self._step(tokens, watch)
        self.newest = stepped.logits, stepped.best
        return stepped


def watch_heat(decoder: Decoder, watched: Watched) -> tuple[Carry, UInt8[Array, "b t"] | None]:
    """Return a layer's heat map: number of KV heads that fetch each cached token; None if none do.

    This is a `Watch` function: it uses the requests of a layerwise step.
    """
    return watched.after, None if watched.selection is None else _heat(decoder, watched)


@compiled(lambda at: at.batch)
def _heat(decoder: Decoder, watched: Watched) -> UInt8[Array, "b t"]:
    assert watched.host is not None
    capacity = capacity_of(watched.host, len(watched.positions))
    requested = watched.request(decoder, capacity).mask(capacity)
    return jnp.sum(requested, axis=1, dtype=jnp.uint8)
