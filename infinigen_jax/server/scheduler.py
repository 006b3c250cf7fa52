"""Scheduler: one thread owns the batch, and requests join and leave it between decode steps.

    submit -> waiting -> reading, a chunk per step -> ready -> a row of the batch for each answer

Other threads only append to the queue and set flags. Running answers wait for at most one chunk of
a prompt per step. Prompts in progress take turns, so that a short one does not wait for a long one.
"""

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from infinigen_jax.engine.dispatch import Stepped
from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.heat_map import watch_heat
from infinigen_jax.engine.live_batch import LiveBatch, Reading, chunk_lengths
from infinigen_jax.engine.results import choices_of
from infinigen_jax.engine.sampler import Drawn, Sampler
from infinigen_jax.programs.compilations import compilations
from infinigen_jax.server.answer import Answer, Piece
from infinigen_jax.server.grammar import allowed_tokens
from infinigen_jax.server.job import BusyError, Intake, Job, RefusedError, Running, UnavailableError
from infinigen_jax.server.limits import READERS, Limits
from infinigen_jax.server.metrics import Metrics
from infinigen_jax.server.prefix_cache import Node, PrefixCache
from infinigen_jax.settings.sampling import MOST_LOG_PROBS, Sampling

logger = logging.getLogger(__name__)

# One for each program of `Sampler`.
SAMPLINGS = (Sampling(), Sampling(temperature=1.0), Sampling(presence_penalty=1.0))


class Unread(NamedTuple):
    """A step in progress, its rows' answers, and the number of tokens cached before it."""

    stepped: Stepped
    running: dict[int, Running]
    cached: np.ndarray


class Scheduler:
    """Requests of a server and the thread that serves them.

    Attributes:
        limits: sizes of the batch and the queue.
        ready: set after the warm-up, when nothing is left to compile.
        failure: message of an error that ended the thread; None while it runs.
    """

    def __init__(self, engine: Engine, limits: Limits, metrics: Metrics):
        self.engine, self.limits, self._metrics = engine, limits, metrics
        self.ready, self.failure = threading.Event(), None
        self._wake = threading.Condition()
        self._stopping = False
        self._waiting: collections.deque[Job] = collections.deque()
        self._intakes: list[Intake] = []
        self._running: dict[int, Running] = {}
        self._unread: Unread | None = None
        self._compiled = 0
        self._prefixes = None
        if limits.prefix_bytes:
            sizes = limits.capacity, limits.chunk, limits.prefix_bytes
            self._prefixes = PrefixCache(engine.decoder, *sizes)
        self._thread = threading.Thread(target=self._serve, name="scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread, which first warms up."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a request.

        Raises:
            BusyError: if too many requests wait.
            UnavailableError: if the server is not ready or is stopping.
        """
        with self._wake:
            if self._stopping or not self.ready.is_set() or self.failure is not None:
                raise UnavailableError
            if len(self._waiting) >= self.limits.waiting:
                raise BusyError
            self._waiting.append(job)
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Drop a request; its rows are free before the next step."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def stop(self, seconds: float) -> None:
        """End the thread after the step in progress; unfinished requests fail."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(seconds)

    @property
    def late_compilations(self) -> int:
        """Number of XLA compilations after the warm-up."""
        return compilations() - self._compiled if self.ready.is_set() else 0

    def metrics_text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        self._metrics.compilations.set(self.late_compilations)
        if self._prefixes is not None:
            self._metrics.prefix_bytes.set(self._prefixes.bytes)
        return self._metrics.text()

    def _serve(self) -> None:
        try:
            begun = time.perf_counter()
            self._make()
            self._warm_up()
            self._compiled = compilations()
            self.ready.set()
            logger.info("ready after %.1f s", time.perf_counter() - begun)
            while self._wait():
                try:
                    self._advance()
                except Exception as error:
                    # The donated arrays of the batch are gone: start again with an empty one.
                    logger.exception("a step failed; its requests end")
                    self._fail_all(error)
                    self._make()
        except Exception as error:
            logger.exception("the scheduler ended")
            self.failure = str(error)
        self._fail_all(UnavailableError())

    def _make(self) -> None:
        """Begin with an empty batch."""
        rows = self.limits.rows
        self._live = LiveBatch(self.engine.runtime, rows, self.limits.capacity)
        self._sampler = self._sampler_of([Sampling()] * rows, [()] * rows)
        host = self._live.cache.host
        self._metrics.host_bytes.set(0 if host is None else host.nbytes)

    def _sampler_of(
        self,
        sampling: list[Sampling],
        prompts: Sequence[Sequence[int]],
        streams: list[int] | None = None,
    ) -> Sampler:
        vocabulary = self.engine.model.config.vocab_size
        return Sampler(self.engine.mesh, vocabulary, sampling, prompts, streams)

    def _warm_up(self) -> None:
        """Run every program: a prompt of each chunk length, and steps with each kind of draw."""
        limits, reading = self.limits, None
        for length in chunk_lengths(limits.chunk):
            tokens = np.zeros(length, np.int32)
            reading = Reading(self.engine.runtime, tokens, limits.capacity, limits.chunk)
            reading.advance()
            if self._prefixes is not None:
                self._prefixes.warm_up(reading)
            self._live.join(0, reading)
            self._live.leave(0)
        assert reading is not None
        self._live.join(0, reading)
        every = allowed_tokens({}, limits.rows, self.engine.model.config.vocab_size)
        drawn: Drawn | None = None
        to_flush = self.engine.decoder.policy.window + 1
        for sampling, number in zip(SAMPLINGS, (to_flush, 1, 1), strict=True):
            self._sampler.replace(0, self._sampler_of([sampling], [(0,)]))
            for _ in range(number):
                logits, best = self._live.logits, self._live.best
                drawn = self._sampler.draw(logits, best, every, log_probs=True)
                self._live.step(drawn.tokens)
        if limits.heat_maps:
            self._live.step(self._live.best, watch_heat)
        jax.block_until_ready((drawn, self._live.logits))
        self._leave(0)

    def _wait(self) -> bool:
        """Wait for work; return False when stopping."""
        with self._wake:
            self._metrics.queue(len(self._waiting) + len(self._intakes), len(self._running))
            while not (self._stopping or self._waiting or self._intakes or self._running):
                self._wake.wait()
            return not self._stopping

    def _advance(self) -> None:
        """Read a chunk, let complete prompts join, and dispatch a step."""
        self._drop_cancelled()
        with self._wake:
            while self._waiting and len(self._intakes) < READERS:
                self._intakes.append(Intake(self._waiting.popleft()))
        self._join()
        if self._running:
            self._step()
        self._read()

    def _read(self) -> None:
        """Read a chunk of the prompt that has waited longest for its turn."""
        intake = next((intake for intake in self._intakes if not intake.complete), None)
        if intake is None:
            return
        if intake.reading is None:
            intake.reading, intake.node = self._begin(intake.job)
        intake.reading.advance()
        if intake.node is not None:
            assert self._prefixes is not None
            intake.node = self._prefixes.store(intake.node, intake.reading)
        self._intakes.remove(intake)
        self._intakes.append(intake)

    def _begin(self, job: Job) -> tuple[Reading, Node | None]:
        """Begin to read a prompt after the tokens that the prefix cache has."""
        limits, tokens, node, cache = self.limits, np.asarray(job.tokens, np.int32), None, None
        if self._prefixes is not None:
            node = self._prefixes.find(tokens)
            cache, job.cached_tokens = self._prefixes.restore(node), node.end
        runtime, done = self.engine.runtime, job.cached_tokens
        return Reading(runtime, tokens, limits.capacity, limits.chunk, cache, done), node

    def _drop_cancelled(self) -> None:
        with self._wake:
            dropped = [job for job in self._waiting if job.cancelled]
            for job in dropped:
                self._waiting.remove(job)
        dropped += [intake.job for intake in self._intakes if intake.job.cancelled]
        dropped += [running.job for running in self._running.values() if running.job.cancelled]
        self._intakes = [intake for intake in self._intakes if not intake.job.cancelled]
        for row in [row for row, running in self._running.items() if running.job.cancelled]:
            self._leave(row)
        for job in dict.fromkeys(dropped):
            self._metrics.done(job, "cancelled")

    def _join(self) -> None:
        """Give rows to the answers of complete prompts."""
        for intake in [intake for intake in self._intakes if intake.complete]:
            job = intake.job
            while intake.joined < job.answers:
                idle = np.flatnonzero(self._live.idle)
                if not len(idle) or not self._live.can_join:
                    return
                row, number = int(idle[0]), intake.joined
                assert intake.reading is not None
                self._live.join(row, intake.reading, job.budget)
                sampler = self._sampler_of([job.sampling], [job.tokens], [number])
                self._sampler.replace(row, sampler)
                tokenizer = self.engine.model.tokenizer
                matcher = None if job.matcher is None else job.matcher.deep_copy()
                answer = Answer(tokenizer, number, job.most, job.stop, job.ends, matcher)
                self._running[row] = Running(job, answer)
                intake.joined += 1
            self._intakes.remove(intake)

    def _step(self) -> None:
        """Draw a token for each row, dispatch the next step, and send the tokens.

        The device computes the step while the tokens are turned into text.
        """
        wanted = any(each.job.top is not None for each in self._running.values())
        given = self._live.logits, self._live.best, self._allowed()
        tokens, log_probs = self._sampler.draw(*given, log_probs=wanted)
        heat = any(each.job.heat for each in self._running.values())
        before, running = self._unread, dict(self._running)
        cached = self._live.cached
        stepped = self._live.step(tokens, watch_heat if heat else None)
        self._unread = Unread(stepped, running, cached)
        drawn = np.asarray(tokens)
        if before is not None:
            self._count_rows(before)
        choices = None if log_probs is None else choices_of(log_probs, MOST_LOG_PROBS)
        for row, each in running.items():
            matcher = each.answer.matcher
            if matcher is not None and matcher.is_error():
                self._refuse(each.job, matcher.get_error().splitlines()[0])
                continue
            choice = None if each.job.top is None or choices is None else choices[row]
            piece = each.answer.push(int(drawn[row]), choice)
            if each.job.heat and before is not None and before.running.get(row) is each:
                piece = dataclasses.replace(piece, heat=heat_of(before, row))
            self._send(row, each.job, piece)

    def _allowed(self) -> np.ndarray | None:
        """Return the tokens that each row may draw; None if all rows may draw all tokens."""
        answers = {row: each.answer for row, each in self._running.items()}
        matchers = {row: a.matcher for row, a in answers.items() if a.matcher is not None}
        if not matchers:
            return None
        return allowed_tokens(matchers, self.limits.rows, self.engine.model.config.vocab_size)

    def _send(self, row: int, job: Job, piece: Piece) -> None:
        now = time.perf_counter()
        job.new_tokens += 1
        self._metrics.token(now - (job.last or job.arrived), first=not job.first)
        job.first, job.last = job.first or now, now
        if piece.finish is not None:
            self._leave(row)
            job.finished += 1
        if job.finished == job.answers:
            self._metrics.done(job, "ok")
        if not job.cancelled:
            job.send(piece)

    def _refuse(self, job: Job, problem: str) -> None:
        """End a request whose schema llguidance gave up on."""
        job.send(RefusedError(f"response_format: {problem}", "response_format"))
        job.cancelled = True

    def _leave(self, row: int) -> None:
        self._running.pop(row, None)
        self._live.leave(row)
        self._sampler.leave(row)

    def _count_rows(self, step: Unread) -> None:
        """Add the rows that a step fetched to its requests."""
        moved, decoder = np.asarray(step.stepped.counts.moved), self.engine.decoder
        for row, each in step.running.items():
            size = int(step.cached[row]) * decoder.host_layers * decoder.config.num_kv_heads
            each.job.moved += int(moved[row]) / max(1, size)
            each.job.steps += 1
            self._metrics.rows(int(moved[row]))

    def _fail_all(self, error: Exception) -> None:
        """End every request with an error."""
        with self._wake:
            jobs = {job: None for job in self._waiting}
            self._waiting.clear()
        jobs |= {intake.job: None for intake in self._intakes}
        jobs |= {running.job: None for running in self._running.values()}
        self._intakes.clear()
        self._running.clear()
        self._unread = None
        for job in jobs:
            self._metrics.done(job, "failed")
            job.send(error)


def heat_of(step: Unread, row: int) -> np.ndarray | None:
    """Return a row's heat map, [l, t] uint8; None if the step was not watched."""
    records = [record for record in step.stepped.records if record is not None]
    return np.stack([np.asarray(r)[row, : step.cached[row]] for r in records]) if records else None
