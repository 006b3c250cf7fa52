"""Batch of a server with the sampling of its sequences; answers join, get tokens and leave.

A `SteppedBatch` gives each sequence one token per decode step. A `RoundBatch`, of a lossless
engine, gives each sequence one or several tokens per round.
"""

import abc
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt8
from llguidance import LLMatcher

from infinigen_jax.cache.cache import Cache
from infinigen_jax.decode.state import Counts
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.live_batch import LiveBatch, OpenBatch, Reading, Single, watch_heat
from infinigen_jax.engine.lossless import LosslessBatch
from infinigen_jax.engine.results import Choice, choices_of
from infinigen_jax.engine.sampler import Drawn, Sampler
from infinigen_jax.prefill.prefill import empty_cache
from infinigen_jax.sampling import LogProbs
from infinigen_jax.server.answer import Answer
from infinigen_jax.server.limits import Limits
from infinigen_jax.server.metrics import Metrics
from infinigen_jax.settings.sampling import MOST_LOG_PROBS, Sampling

COPIED = 1024  # tokens whose rows are copied in about the time of a step
MOST_HEAT = 32_768  # cached tokens of a step with a heat map; one of more takes many megabytes

# One for each program of `Sampler`.
SAMPLINGS = (Sampling(), Sampling(temperature=1.0), Sampling(presence_penalty=1.0))


class NewToken(NamedTuple):
    """Token of an answer, with its choice, if any answer asks for it, and its step's heat map."""

    sequence: int
    answer: Answer
    token: int
    choice: Choice | None
    heat: np.ndarray | None = None


class ServedBatch(abc.ABC):
    """Sequences of a batch, their sampling and the answers in them.

    An answer that is alone is decoded in a batch of one, which takes over the cache that its prompt
    was read into. It moves to the whole batch when another one joins, and back when it has been
    alone for as long as its copy takes (`narrow`).
    """

    kind: type[OpenBatch]
    live: OpenBatch

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics):
        self.running: dict[int, Answer] = {}
        self._decoder = decoder = engine.decoder
        self._metrics, self._heat_maps = metrics, limits.heat_maps
        self._rows_per_token = decoder.host_layers * decoder.config.num_kv_heads
        batch, runtime = limits.batch, engine.runtime
        self._capacity, self._spare = limits.capacity, None
        self._steps_alone = 0  # in the whole batch
        self.live = self._whole = self.kind(runtime, batch)
        self.live.cache = empty_cache(decoder, batch, limits.capacity)
        self._alone = self.kind(runtime, 1)
        self._sampler_of = functools.partial(Sampler, runtime.mesh, decoder.config.vocab_size)
        self._sampler = self._whole_sampler = self._sampler_of([Sampling()] * batch, [()] * batch)

    def empty_cache(self) -> Cache:
        """Return a cache for a prompt, in an earlier host array, because new memory is slow."""
        return empty_cache(self._decoder, 1, self._capacity, host=self._take_spare())

    def reuse(self, reading: Reading) -> None:
        """Keep a prompt's host array after all of its answers have joined."""
        if self.live is self._whole or self.live.cache is not reading.cache:
            self._spare = reading.cache.host

    def _take_spare(self) -> Array | None:
        spare, self._spare = self._spare, None
        return spare

    @property
    def free(self) -> int | None:
        """Sequence for the next answer; None while none can join."""
        idle = np.flatnonzero(self._whole.idle)
        if self.live is self._alone:
            idle = idle[1:]  # its answer moves to the first place
        return int(idle[0]) if len(idle) and self.live.can_join else None

    def join(self, sequence: int, reading: Reading, answer: Answer) -> None:
        """Give a free sequence to an answer of a complete prompt."""
        job = answer.job
        sampler = self._sampler_of([job.sampling], [job.tokens], [answer.number])
        single = self._begin(reading, answer, sampler)
        if self.running or job.answers > 1:
            self._widen()
            self.live.join(sequence, single)
            self._sampler.replace(sequence, sampler)
        else:  # in place 0, the first of an idle batch
            self._be_alone(single, sampler)
        self.running[sequence] = answer

    def leave(self, sequence: int) -> None:
        """Make a sequence free."""
        self.running.pop(sequence, None)
        self.live.leave(sequence)
        self._sampler.leave(sequence)
        if not self.running and self.live is self._alone:
            self._return()

    def narrow(self) -> None:
        """Move an answer that is alone to the batch of one, while no other is about to join."""
        alone = self.live is self._whole and len(self.running) == 1
        self._steps_alone = self._steps_alone + 1 if alone else 0
        if not alone or len(self._whole.active) == 1 or not self.live.can_join:
            return
        ((sequence, answer),) = self.running.items()
        if self._steps_alone * COPIED > self.live.cached[sequence]:
            self._narrow(sequence)
            self.running = {0: answer}

    def _narrow(self, sequence: int) -> None:
        """Move a sequence of the whole batch to the batch of one."""
        sampler = self._sampler.single(sequence)
        single = self.live.single(sequence, self._take_spare())
        self._sampler.leave(sequence)
        self._be_alone(single, sampler)

    def _be_alone(self, single: Single, sampler: Sampler) -> None:
        self._alone.take(single)
        self.live, self._sampler = self._alone, sampler

    def _widen(self) -> None:
        """Decode in the whole batch; the answer that was alone is its first one."""
        if self.live is not self._whole:
            self._whole.join(0, self._alone.single(0))
            self._whole_sampler.replace(0, self._sampler)
            self._return()

    def _return(self) -> None:
        """Decode in the whole batch from now on."""
        self._spare = self._alone.release()
        self.live, self._sampler = self._whole, self._whole_sampler

    @abc.abstractmethod
    def advance(self) -> Iterator[NewToken]:
        """Yield new tokens, at least one of each answer; those of an answer follow each other.

        An answer may leave while tokens are yielded; the caller drops those that follow.
        """

    def warm_up(self, reading: Reading) -> Iterator[None]:
        """Run every program, with a complete prompt in sequence 0; yield between programs."""
        yield
        self.live.join(0, self._begin(reading))
        yield from self._try_steps(reading)
        if len(self._whole.active) > 1:
            self.live.settle()  # so that a sequence may move, whatever the policy
            self._narrow(0)
            yield from self._try_steps(reading)
            self.live.settle()
            self._widen()
        self.leave(0)

    @abc.abstractmethod
    def _begin(
        self, reading: Reading, answer: Answer | None = None, sampler: Sampler | None = None
    ) -> Single:
        """Return the sequence of a complete prompt; a new answer's sampler may draw a token."""

    @abc.abstractmethod
    def _try_steps(self, reading: Reading) -> Iterator[None]:
        """Run every program of steps and draws, with a sequence in the first place."""

    @property
    def _wants_scores(self) -> bool:
        return any(each.job.top is not None for each in self.running.values())

    @property
    def _wants_heat(self) -> list[int]:
        cached = self.live.cached
        return [i for i, a in self.running.items() if a.job.heat and cached[i] <= MOST_HEAT]

    def _count_rows(self, counts: Counts, running: dict[int, Answer], cached: np.ndarray) -> None:
        """Add the rows that a step after `cached` tokens fetched to its requests."""
        moved = np.asarray(counts.moved)
        for sequence, each in running.items():
            rows = int(cached[sequence]) * self._rows_per_token
            each.job.moved += int(moved[sequence]) / max(1, rows)
            each.job.steps += 1
            self._metrics.rows(int(moved[sequence]))


class SteppedBatch(ServedBatch):
    kind = LiveBatch
    live: LiveBatch

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics):
        super().__init__(engine, limits, metrics)
        # Of the step in progress: arguments of `_count_rows`, and of `_read_heat` by answer.
        self._unread: tuple[Counts, dict[int, Answer], np.ndarray] | None = None
        self._heats: dict[Answer, tuple[Array | None, int]] = {}

    def advance(self) -> Iterator[NewToken]:
        """Draw tokens, dispatch the next step, and yield the tokens while the device computes."""
        before, running = self._unread, dict(self.running)
        matchers = {s: a.matcher for s, a in running.items() if a.matcher is not None}
        allowed = allowed_tokens(matchers, *self.live.logits.shape) if matchers else None
        given = self.live.logits, self.live.best, allowed
        tokens, log_probs = self._sampler.draw(*given, log_probs=self._wants_scores)
        heats, cached, wanted = self._heats, self.live.cached, self._wants_heat
        stepped = self.live.step(tokens, watch_heat if wanted else None)
        # Before the next step, for which they would otherwise wait.
        self._heats = {running[s]: (heat_of(stepped.records, s), int(cached[s])) for s in wanted}
        self._unread = stepped.counts, running, cached
        drawn = np.asarray(tokens)
        if before is not None:
            self._count_rows(*before)
        choices = _choices(log_probs, len(drawn))
        for sequence, each in running.items():
            heat = _read_heat(*heats.get(each, (None, 0)))
            yield NewToken(sequence, each, int(drawn[sequence]), choices[sequence], heat)

    def _begin(
        self, reading: Reading, answer: Answer | None = None, sampler: Sampler | None = None
    ) -> Single:
        return reading.single(budget=None if answer is None else answer.job.budget)

    def _try_steps(self, reading: Reading) -> Iterator[None]:
        every = allowed_tokens({}, *self.live.logits.shape)
        # Draws without penalties come first and use a separate program.
        self._sampler.leave(0)
        self.live.rest()
        self.live.settle()
        drawn: Drawn | None = None
        for sampling in SAMPLINGS:
            self._sampler.replace(0, self._sampler_of([sampling], [(0,)]))
            drawn = self._sampler.draw(self.live.logits, self.live.best, every, log_probs=True)
            yield
            self.live.step(drawn.tokens)
            yield
        if self._heat_maps:
            heat_of(self.live.step(self.live.best, watch_heat).records, 0)
        jax.block_until_ready((drawn, self.live.logits))


class RoundBatch(ServedBatch):
    kind = LosslessBatch
    live: LosslessBatch

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics):
        super().__init__(engine, limits, metrics)
        self._first: dict[Answer, Drawn] = {}

    def advance(self) -> Iterator[NewToken]:
        """Yield the first tokens of new answers, then the tokens of a round."""
        first, self._first = self._first, {}
        for sequence, each in dict(self.running).items():
            if (drawn := first.get(each)) is not None:
                (choice,) = _choices(drawn.log_probs, 1)
                yield NewToken(sequence, each, int(np.asarray(drawn.tokens)[0]), choice)
        if not self.live.active.any():
            return
        running, wanted = dict(self.running), self._wants_heat
        watch = watch_heat if wanted else None
        round_ = self.live.round(self._sampler, log_probs=self._wants_scores, watch=watch)
        drafted = round_.drafted
        for step, counts in enumerate(drafted.counts):
            self._count_rows(counts, running, round_.cached + step)
        for sequence in running:  # a verification reads all rows
            self._metrics.drafted.inc(drafted.count)
            self._metrics.accepted.inc(max(0, int(round_.counts[sequence]) - 1))
            self._metrics.rows(int(round_.cached[sequence]) * self._rows_per_token)
        for place in range(int(round_.counts.max())):
            log_probs = None if round_.log_probs is None else round_.log_probs[place]
            choices = _choices(log_probs, len(round_.counts))
            for sequence, each in running.items():
                if place < round_.counts[sequence]:
                    heat = None
                    if sequence in wanted and place < drafted.count:
                        made = heat_of(drafted.records[place], sequence)
                        heat = _read_heat(made, int(round_.cached[sequence]) + place)
                    token = int(round_.tokens[sequence, place])
                    yield NewToken(sequence, each, token, choices[sequence], heat)

    def _begin(
        self, reading: Reading, answer: Answer | None = None, sampler: Sampler | None = None
    ) -> Single:
        if answer is None or sampler is None:
            return reading.single(reading.predicted[1])
        job = answer.job
        drawn = sampler.draw(*reading.predicted, log_probs=job.top is not None)
        self._first[answer] = drawn
        return reading.single(drawn.tokens, job.budget, job.most - 1)

    def _try_steps(self, reading: Reading) -> Iterator[None]:
        # Draws without penalties come first and use a separate program.
        self._sampler.leave(0)
        for sampling in SAMPLINGS:
            sampler = self._sampler_of([sampling], [(0,)])
            jax.block_until_ready(sampler.draw(*reading.predicted, log_probs=True))
            self._sampler.replace(0, sampler)
            heat = self._heat_maps and sampling.greedy and not sampling.penalises
            yield
            for records in self.live.warm_up(self._sampler, watch_heat if heat else None):
                heat_of(records, 0)
            yield


@jax.jit
def heat_of(records: Sequence[Any], sequence: Int[Array, ""]) -> UInt8[Array, "l t"] | None:
    """Return a sequence's heat map on the device; None if no layer selects rows."""
    made = [record[sequence] for record in records if record is not None]
    return jnp.stack(made) if made else None


def _read_heat(heat: Array | None, cached: int) -> np.ndarray | None:
    return None if heat is None else np.asarray(heat)[:, :cached]


def _choices(log_probs: LogProbs | None, batch: int) -> Sequence[Choice | None]:
    return [None] * batch if log_probs is None else choices_of(log_probs, MOST_LOG_PROBS)


def allowed_tokens(matchers: Mapping[int, LLMatcher], batch: int, vocabulary: int) -> np.ndarray:
    """Return the tokens that sequences may draw, all without a matcher: bits, int32 [b, v / 32].

    The host computes them while the device computes the step that gives the next logits.
    """
    allowed = np.full((batch, -(-vocabulary // 32)), -1, np.int32)
    for sequence, matcher in matchers.items():
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)
        allowed[sequence] = mask[: allowed.shape[1]]
    return allowed
