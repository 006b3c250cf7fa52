"""Scheduler: one thread owns the batch, and requests join and leave it between decode steps.

    submit -> waiting -> reading, a chunk per step -> ready -> a sequence of the batch per answer

Other threads only append to the queue and set flags. Running answers wait for at most one chunk of
a prompt per step. Prompts in progress take turns, so that a short one does not wait for a long one.
"""

import collections
import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from infinigen_jax.engine.engine import Engine
from infinigen_jax.engine.live_batch import Reading, chunk_lengths
from infinigen_jax.engine.prompts import may_share
from infinigen_jax.programs.compilations import compilations
from infinigen_jax.server.answer import Answer, Job, RefusedError
from infinigen_jax.server.batch import NewToken, RoundBatch, SteppedBatch
from infinigen_jax.server.limits import READERS, Limits
from infinigen_jax.server.metrics import Metrics
from infinigen_jax.server.prefix_cache import Node, PrefixCache

UNAVAILABLE = "the server is starting or stopping"

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Intake:
    """Prompt that is read, or complete and waiting for sequences.

    `node` is that of the prefix cache at the end of the tokens read so far; `stored` are the nodes
    up to it that are still to be copied. `admitted` answers have a sequence.
    """

    job: Job
    reading: Reading | None = None
    node: Node | None = None
    stored: collections.deque[Node] = dataclasses.field(default_factory=collections.deque)
    admitted: int = 0

    @property
    def complete(self) -> bool:
        return self.reading is not None and self.reading.complete


class Scheduler:
    """Requests of a server and the thread that serves them.

    `ready` is set after the warm-up, when nothing is left to compile, and after `prepare`, which
    runs meanwhile. An error that ends the thread sets its message, `failure`, and calls `failed`.
    """

    def __init__(self, engine: Engine, limits: Limits):
        self.engine, self.limits, self._metrics = engine, limits, Metrics(engine.decoder)
        self._lossless = engine.runtime.settings.lossless
        self.ready, self.failure = threading.Event(), None
        self.failed: Callable[[], None] = lambda: None
        self.prepare: Callable[[], Any] = lambda: None  # its errors are ignored
        self._wake = threading.Condition()
        self._stopping = False
        self._waiting: collections.deque[Job] = collections.deque()
        self._intakes: list[Intake] = []
        self._compiled = 0
        self._free = limits.batch  # sequences without a request; below 0 if prompts are read ahead
        self._prefixes = None
        if limits.prefix_bytes:
            sizes = limits.capacity, limits.chunk, limits.prefix_bytes
            self._prefixes = PrefixCache(engine.decoder, *sizes)
        self._make()
        self._thread = threading.Thread(target=self._serve, name="scheduler", daemon=True)

    def start(self) -> None:
        """Start the thread, which first warms up."""
        self._thread.start()

    def check(self, prompts: int) -> None:
        """Raise RefusedError if this number of prompts of a request cannot be queued."""
        most = self.limits.waiting
        if prompts > most:
            raise RefusedError(f"at most {most} prompts in a request, not {prompts}", "prompt")
        with self._wake:
            if self._stopping or not self.ready.is_set() or self.failure is not None:
                raise RefusedError(UNAVAILABLE, status=503)
            if len(self._waiting) + prompts > most + self._free:
                raise RefusedError("too many requests wait; try again later", status=429)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue a request's prompts, all or none; raise as `check` does."""
        with self._wake:
            self.check(len(jobs))
            self._waiting += jobs
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Drop a request; its sequences are free before the next step."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def stop(self, seconds: float) -> bool:
        """End the thread after the step in progress, and say if it ended within this time."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def late_compilations(self) -> int:
        """Number of XLA compilations after the warm-up."""
        return compilations() - self._compiled if self.ready.is_set() else 0

    def metrics_text(self) -> bytes:
        self._metrics.compilations.set(self.late_compilations)
        if self._prefixes is not None:
            self._metrics.prefix_bytes.set(self._prefixes.bytes)
        return self._metrics.text()

    def _serve(self) -> None:
        try:
            begun = time.perf_counter()
            with concurrent.futures.ThreadPoolExecutor(1, "prepare") as pool:
                pool.submit(self.prepare)
                stopped = any(self._stopping for _ in self._warm_up())
            if not stopped:
                self._compiled = compilations()
                self.ready.set()
                logger.info("ready after %.1f s", time.perf_counter() - begun)
            while self._wait():
                try:
                    self._advance()
                    continue
                except Exception as error:
                    logger.exception("a step failed; its requests end")
                    # Without the trace, which holds the batch.
                    self._fail(error.with_traceback(None), begun_only=True)
                # The donated arrays of the batch are lost: continue with an empty one.
                del self._batch
                self._make()
        except BaseException as error:  # such as panics of libraries in Rust
            logger.exception("the scheduler ended")
            self.failure = str(error) or repr(error)
        self._fail(RefusedError(UNAVAILABLE, status=503))
        if self.failure is not None:
            self.failed()

    def _make(self) -> None:
        kind = RoundBatch if self._lossless else SteppedBatch
        self._batch = kind(self.engine, self.limits, self._metrics)
        host = self._batch.live.cache.host
        self._metrics.host_bytes.set(0 if host is None else host.nbytes)

    def _warm_up(self) -> Iterator[None]:
        """Run every program; yield between them, so that a server may stop there."""
        limits, reading = self.limits, None
        for length in chunk_lengths(limits.chunk):
            yield
            tokens = np.zeros(length, np.int32)
            cache = self._batch.empty_cache()
            reading = Reading(self.engine.runtime, tokens, cache, limits.chunk)
            reading.advance()
            if self._prefixes is not None:
                self._prefixes.warm_up(reading)
        assert reading is not None
        yield from self._batch.warm_up(reading)
        yield

    def _wait(self) -> bool:
        """Wait for work; return False when stopping."""
        with self._wake:
            running, begun = len(self._batch.running), len(self._intakes)
            self._metrics.waiting.set(len(self._waiting) + begun)
            self._metrics.running.set(running)
            self._free = self.limits.batch - running - begun
            while not (self._stopping or self._waiting or self._intakes or self._batch.running):
                self._wake.wait()
            return not self._stopping

    def _advance(self) -> None:
        """Drop cancelled jobs, let complete prompts join, advance the batch, and read a chunk."""
        self._drop_cancelled()
        with self._wake:
            while self._waiting and len(self._intakes) < READERS:
                self._intakes.append(Intake(self._waiting.popleft()))
        self._join()
        if not self._intakes:
            self._batch.narrow()
        now = 0.0  # the tokens of a step or round have one time
        for token in self._batch.advance() if self._batch.running else ():
            now = now or time.perf_counter()
            self._take(token, now)
        self._read()

    def _read(self) -> None:
        """Read a chunk of the prompt that has waited longest for its turn."""
        intake = next((intake for intake in self._intakes if not intake.complete), None)
        if intake is None:
            return
        self._intakes.remove(intake)
        self._intakes.append(intake)
        if intake.reading is None:
            intake.reading = self._begin(intake)
        if self._prefixes is not None and intake.stored:
            node, reading = intake.stored.popleft(), intake.reading
            reading.cache = self._prefixes.fill(node, reading.cache)
            return
        intake.reading.advance()
        intake.job.read_tokens = intake.reading.done
        if self._lossless:
            intake.reading.wait()  # or it would slow the next round, which is timed
        if self._prefixes is not None and intake.node is not None:
            intake.node = self._prefixes.store(intake.node, intake.reading)

    def _begin(self, intake: Intake) -> Reading:
        """Begin to read a prompt after the tokens that the prefix cache has."""
        job, cache = intake.job, self._batch.empty_cache()
        tokens = np.asarray(job.tokens, np.int32)
        if self._prefixes is not None and may_share(self.engine.model.config, len(tokens)):
            node = intake.node = self._prefixes.find(tokens)
            intake.stored.extend(node.chain())
            cache = self._prefixes.begin(node, cache)
            job.cached_tokens = job.read_tokens = node.end
        return Reading(self.engine.runtime, tokens, cache, self.limits.chunk, job.cached_tokens)

    def _drop_cancelled(self) -> None:
        with self._wake:
            dropped = [job for job in self._waiting if job.cancelled]
            for job in dropped:
                self._waiting.remove(job)
        running = dict(self._batch.running)
        begun = [each.job for each in (*self._intakes, *running.values())]
        dropped += [job for job in begun if job.cancelled]  # more may be cancelled meanwhile
        self._intakes = [intake for intake in self._intakes if intake.job not in dropped]
        for sequence in [sequence for sequence, each in running.items() if each.job in dropped]:
            self._batch.leave(sequence)
        for job in dict.fromkeys(dropped):
            self._metrics.done(job, job.outcome)

    def _join(self) -> None:
        """Give sequences to the answers of complete prompts."""
        for intake in [intake for intake in self._intakes if intake.complete]:
            reading = intake.reading
            assert reading is not None
            while intake.admitted < intake.job.answers:
                if (sequence := self._batch.free) is None:
                    return
                answer = Answer(self.engine.model.tokenizer, intake.job, intake.admitted)
                self._batch.join(sequence, reading, answer)
                intake.admitted += 1
            self._intakes.remove(intake)
            self._batch.reuse(reading)

    def _take(self, new: NewToken, now: float) -> None:
        """Send a new token's text, unless its answer has ended."""
        answer, job = new.answer, new.answer.job
        if self._batch.running.get(new.sequence) is not answer or job.cancelled:
            return
        if answer.matcher is not None and answer.matcher.is_error():
            # llguidance cannot follow the schema any further.
            problem = answer.matcher.get_error().splitlines()[0]
            job.send(RefusedError(problem, "response_format"))
            job.outcome, job.cancelled = "refused", True
            return
        piece = answer.push(new.token, None if job.top is None else new.choice, new.heat)
        job.new_tokens += 1
        job.begun += not answer.last
        self._metrics.token(now - (answer.last or job.arrived), first=not answer.last)
        job.first, job.last, answer.last = job.first or now, now, now
        if piece.finish is not None:
            self._batch.leave(new.sequence)
            job.finished += 1
        if job.finished == job.answers:
            self._metrics.done(job, "ok")
        if not job.cancelled:
            job.send(piece)

    def _fail(self, error: Exception, *, begun_only: bool = False) -> None:
        """End every request with an error, or those that have begun."""
        jobs = [intake.job for intake in self._intakes]
        self._intakes.clear()
        if not begun_only:
            with self._wake:
                jobs += self._waiting
                self._waiting.clear()
        if hasattr(self, "_batch"):  # not if a new one could not be made
            jobs += [answer.job for answer in self._batch.running.values()]
            self._batch.running.clear()
        for job in dict.fromkeys(jobs):
            self._metrics.done(job, "failed")
            job.send(error)
