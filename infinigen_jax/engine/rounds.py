"""Rounds over a batch: tokens are drafted, verified in one pass, and committed (docs/lossless.md).

Python waits for each part, which times it. The times and the acceptance rate choose the number of
tokens of the next draft.

Drafts are accepted by the tokens that the full model draws. A draw is a function of logits,
settings and a random number, which depends on the seed and on the number of tokens drawn before
(`sampling.uniforms`). Draft and full model use the same numbers:

    drafted     a b c d           the full model's draws after the last token, a, ab, abc, abcd
    verified    a b x . .         x replaces c: it is the full model's own draw after a b

Drafted steps are undone: arrays that they destroy are copied before, and restored before a commit.

    copied       rings of recent rows, sums over the rows that left them, lengths, and the state of
                 a policy that observes
    harmless     rows of device layers beyond the length; drafted rows never reach the host

Hot sets stay: a draft of at most `window` steps requests only rows that were cached before it.
"""

import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.cache.cache import Cache, cache_shardings
from infinigen_jax.cache.host_array import Placement
from infinigen_jax.cache.hot_set import HotSet
from infinigen_jax.cache.layers import DenseLayer
from infinigen_jax.decode.compiled import compiled
from infinigen_jax.decode.compiler_options import layer_options
from infinigen_jax.decode.finite_check import Places, refuse
from infinigen_jax.decode.layer import Decoder
from infinigen_jax.decode.state import Counts
from infinigen_jax.decode.steps import Watch
from infinigen_jax.engine.batch import Batch, Dispatcher
from infinigen_jax.engine.draft_length import TRIED, DraftLength, size_of
from infinigen_jax.engine.sampler import Draws, Sampler, draw
from infinigen_jax.models import Params
from infinigen_jax.prefill.verification import Verified, commit, verify
from infinigen_jax.sampling import LogProbs


class Given(NamedTuple):
    """Inputs of a round."""

    last: Int[Array, " b"]  # last token of each sequence, not cached yet
    room: Int[np.ndarray, " b"]  # tokens that each sequence may still get; 0 for idle ones
    ends: Int[Array, " n"]  # tokens that end a sequence
    draws: Draws | None  # state of the sampler; None if greedy


class Drafted(NamedTuple):
    """A dispatched draft; for `places` and `records`, of all steps, see `Stepped`."""

    tokens: Int[Array, "b c"]  # the last token and the drafted ones, then negative numbers
    count: int  # number of drafted tokens
    counts: list[Counts]  # rows selected and moved in each step
    places: list[Any]
    records: list[tuple[Any, ...]]


class Verdict(NamedTuple):
    """Outcome of a verification."""

    drawn: Int[Array, "b c"]  # the full model's draws, of which the first `count` are new tokens
    count: Int[Array, " b"]  # new tokens of each sequence, and its leading inputs to commit
    last: Int[Array, " b"]  # last new token; the token before if there is none
    ended: Bool[Array, " b"]  # whether a sequence gets no more tokens
    draws: Draws | None  # state of the sampler after these tokens; None if greedy
    logits: Float[Array, "n v"]  # after every token of every sequence, in one axis


class Judged(NamedTuple):
    """A dispatched verification."""

    drafted: Drafted
    verified: Verified
    verdict: Verdict
    places: Places | None


class Rounds:
    """Drafts and verifications of a batch whose rows are all on the host.

    `drafts` dispatches drafted steps, `length` chooses their number, and `seconds` are the times of
    drafts and of verifications.
    """

    def __init__(self, batch: Batch, length: DraftLength | None = None, *, changing: bool = False):
        """Prepare rounds, with the `length` of earlier rounds of this runtime, if any.

        `changing` states whether texts of any length may join the batch.
        """
        runtime = batch.runtime
        # A cycle would keep a finished batch's cache in memory until a garbage collection.
        self._batch = weakref.proxy(batch)
        self._runtime, self._decoder = runtime, batch.decoder
        self._at = Placement(runtime.mesh)
        most = runtime.most_drafted
        self.length = length or DraftLength(most, ages=changing)
        self.seconds = [0.0, 0.0]
        self.drafts = Dispatcher(runtime, batch.exceeded, drafts=True)
        self._numbers = [self.put(np.int32(i), self._at.whole) for i in range(most + 1)]

    def put(self, array: np.ndarray | np.int32, sharding: Any = None) -> Array:
        """Copy an array to the device; the caller must not change it afterwards."""
        return jax.device_put(array, sharding or self._at.batch, may_alias=False)

    def ends(self, tokens: Sequence[int]) -> Int[Array, " n"]:
        """Copy the tokens that end a sequence to the device."""
        return self.put(np.array(tokens or [-1], np.int32), self._at.whole)

    def run(self, given: Given, *, timed: bool, watch: Watch | None = None) -> Judged:
        """Draft and verify; wait for both. A first round compiles and is not `timed`."""
        positions = self._decoder.config.max_positions - 1 - int(self._batch.cached.max())
        count = self.length.choose(max(0, min(int(given.room.max()) - 1, positions)))
        begun = time.perf_counter()
        drafted = self._draft(given, count, watch)
        # The verification is dispatched later: its dispatch may wait for the device.
        drafted.tokens.block_until_ready()
        between = time.perf_counter()
        judged = self._judge(given, drafted, size_of(count))
        judged.verdict.count.block_until_ready()
        if timed:
            draft, verification = between - begun, time.perf_counter() - between
            self.length.time_draft(count, draft)
            self.length.time_verification(size_of(count), verification)
            self.seconds = [self.seconds[0] + draft, self.seconds[1] + verification]
        return judged

    def _draft(self, given: Given, count: int, watch: Watch | None = None) -> Drafted:
        """Dispatch a draft and undo its traces in the cache, without waiting."""
        batch, decoder, token = self._batch, self._decoder, given.last
        tokens = begin(decoder, token, size=size_of(self.length.most))
        saved = save(decoder, batch.cache) if count else None
        counts, places, records = [], [], []
        for number in self._numbers[1 : count + 1]:
            stepped = self.drafts.step(batch.cache, token, watch)
            batch.cache = stepped.cache
            counts.append(stepped.counts)
            places += stepped.place
            records.append(stepped.records)
            logits, best = stepped.logits, stepped.best
            token, tokens = draft(decoder, tokens, number, logits, best, given.draws)
        if saved is not None:
            batch.cache = restore(decoder, batch.cache, saved)
        return Drafted(tokens, count, counts, places, records)

    def _judge(self, given: Given, drafted: Drafted, size: int) -> Judged:
        """Dispatch a verification of `size` tokens."""
        batch, embedding = self._batch, self._runtime.weights.params["embedding"]
        places = None
        if self._runtime.settings.check:
            places = Places(self._decoder, embedding, len(batch.cached))
        cached = self._decoder, self._runtime.weights, batch.cache
        verified = verify(*cached, drafted.tokens, size, places)
        inputs = drafted.tokens, self.put(given.room), given.ends, given.draws
        verdict = judge(self._decoder, embedding, verified.x, *inputs)
        return Judged(drafted, verified, verdict, places)

    def read(self, judged: Judged, owner: np.ndarray) -> np.ndarray:
        """Record a round and return its new tokens per sequence; may raise NotFiniteError.

        `owner` is the prompt of each sequence, below 0 for none.
        """
        drafted, counts = judged.drafted, np.asarray(judged.verdict.count)
        checked = [*drafted.places, *([judged.places.place] if judged.places else [])]
        refuse(checked, self._decoder.config.num_layers, owner)
        accepted = np.maximum(counts - 1, 0)
        tested = np.where(judged.verdict.ended, accepted, np.minimum(counts, drafted.count))
        self.length.record(int(accepted.sum()), int(tested.sum()))
        return counts

    def commit(self, judged: Judged, counts: Int[Array, " b"]) -> None:
        """Store the rows of the leading `counts` tokens of each sequence, without waiting."""
        cached = self._decoder, self._runtime.weights, self._batch.cache
        self._batch.cache = commit(*cached, judged.verified, counts)

    def log_probs(self, judged: Judged, sampler: Sampler) -> list[LogProbs]:
        """Return the log-probabilities of the full model's draws, per place in a round."""
        drawn = np.asarray(judged.verdict.drawn)
        values = sampler.log_probs(judged.verdict.logits, self.put(drawn.reshape(-1)))
        arrays: list[Any] = [np.asarray(x).reshape(*drawn.shape, *x.shape[1:]) for x in values]
        return [LogProbs(*(x[:, place] for x in arrays)) for place in range(drawn.shape[1])]

    def warm_up(self, given: Given, sampler: Sampler | None = None) -> None:
        """Compile and time the verifications of all sizes; they change nothing.

        A `sampler` compiles its log-probabilities as well.
        """
        drafted, nothing = self._draft(given, 0), given._replace(room=np.zeros_like(given.room))
        for size in self.length.sizes:
            seconds = []
            for _ in range(1 + TRIED):
                began = time.perf_counter()
                judged = self._judge(nothing, drafted, size)
                self.commit(judged, judged.verdict.count)
                jax.block_until_ready(self._batch.cache.lengths)
                seconds.append(time.perf_counter() - began)
            if sampler is not None:
                self.log_probs(judged, sampler)
            self.length.time_verification(size, min(seconds))

    def warm_up_draft(self, given: Given, watch: Watch | None = None) -> Drafted:
        """Compile and time the longest draft, and return it; it changes nothing."""
        for number in range(1 if watch else 1 + TRIED):
            began = time.perf_counter()
            drafted = self._draft(given, self.length.most, watch)
            drafted.tokens.block_until_ready()
            if number:  # the first one compiles
                self.length.time_draft(drafted.count, time.perf_counter() - began)
        return drafted


@compiled(lambda at: at.batch, static_argnames="size")
def begin(decoder: Decoder, last: Int[Array, " b"], *, size: int) -> Int[Array, "b n"]:
    """Return the tokens to verify before any is drafted."""
    return jnp.full((len(last), size), -1, jnp.int32).at[:, 0].set(last)


@compiled(lambda at: at.batch, donate_argnums=0)
def draft(
    decoder: Decoder,
    tokens: Int[Array, "b c"],
    place: Int[Array, ""],
    logits: Float[Array, "b v"],
    best: Int[Array, " b"],
    draws: Draws | None,
) -> tuple[Int[Array, " b"], Int[Array, "b c"]]:
    """Draw a token and add it to those to verify, which are donated."""
    new = best
    if draws is not None:
        before = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
        new, _ = draw(logits, draws.after(tokens, (before >= 1) & (before < place)))
    return new, lax.dynamic_update_slice(tokens, new[:, None], (jnp.int32(0), place))


@compiled(lambda at: at.batch, layer_options)
def judge(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "b c e"],
    tokens: Int[Array, "b n"],
    room: Int[Array, " b"],
    ends: Int[Array, " m"],
    draws: Draws | None,
) -> Verdict:
    """Compare the tokens to verify with the full model's draws."""
    tokens = tokens[:, : x.shape[1]]
    logits = decoder.logits(params, x).astype(jnp.float32)
    drawn = lax.argmax(logits, 2, jnp.int32) if draws is None else draw_all(logits, draws)
    c = tokens.shape[1]
    place = lax.iota(jnp.int32, c)[None]
    agrees = (drawn[:, :-1] == tokens[:, 1:]).astype(jnp.int32)
    accepted = jnp.sum(jnp.cumprod(agrees, axis=1), axis=1, dtype=jnp.int32)
    end = jnp.any(drawn[:, :, None] == ends[None, None], axis=2)
    first_end = jnp.min(jnp.where(end, place, c), axis=1)
    count = jnp.minimum(jnp.minimum(accepted, first_end) + 1, room)
    newest = jnp.take_along_axis(drawn, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(count > 0, newest, tokens[:, 0])
    if draws is not None:
        draws = draws.after(drawn, place < count[:, None])
    ended = (first_end < count) | (count == room)
    return Verdict(drawn, count, last, ended, draws, logits.reshape(-1, logits.shape[2]))


def draw_all(logits: Float[Array, "b c v"], draws: Draws) -> Int[Array, "b c"]:
    """Draw after every token, each time as if the draws before were the sequence's tokens."""

    def one(draws: Draws, logits: Float[Array, "b v"]) -> tuple[Draws, Array]:
        tokens, draws = draw(logits, draws)
        return draws, tokens

    _, drawn = lax.scan(one, draws, logits.swapaxes(0, 1))
    return drawn.swapaxes(0, 1)


def save(decoder: Decoder, cache: Cache) -> Cache:
    """Copy the arrays that decode steps destroy; None for layers that they only extend."""
    local: Any = tuple(None if isinstance(x, DenseLayer) else x for x in cache.local)
    states = cache.states if decoder.policy.observes else ()
    return _copied(decoder, Cache(None, states, local, cache.lengths))


def restore(decoder: Decoder, cache: Cache, saved: Cache) -> Cache:
    """Return the cache before the steps since `save`; both arguments are consumed."""
    has_sets = any(hot.entries is not None for hot in cache.hot)
    local = (now if old is None else old for now, old in zip(cache.local, saved.local, strict=True))
    return cache._replace(
        local=tuple(local),
        states=saved.states or cache.states,
        lengths=saved.lengths,
        hot=_no_later(decoder, cache.hot, saved.lengths) if has_sets else cache.hot,
    )


@compiled(cache_shardings)
def _copied(decoder: Decoder, cache: Cache) -> Cache:
    return jax.tree.map(jnp.copy, cache)


@compiled(lambda at: at.rows, donate_argnums=0)
def _no_later(decoder: Decoder, hot: Any, lengths: Int[Array, " b"]) -> Any:
    """Return hot sets whose entries were used before the next token.

    `cache.hot_set.replacement` evicts the least recently used entry, and the current use must be
    last.
    """
    newest = (lengths - 1)[:, None, None]

    def no_later(entries: HotSet) -> HotSet:
        return entries._replace(used=jnp.minimum(entries.used, newest))

    return jax.tree.map(no_later, hot, is_leaf=lambda x: isinstance(x, HotSet))
