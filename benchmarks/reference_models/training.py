"""Training loop: state, clock, loss curve, and files written on the way."""

import contextlib
import dataclasses
import importlib.util
import json
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.files import note, write_json
from benchmarks.machine import describe
from benchmarks.reference_models import checkpoints
from benchmarks.reference_models.batches import Batch, Batches
from benchmarks.reference_models.corpus import Corpus
from benchmarks.reference_models.export import export
from benchmarks.reference_models.induction import with_induction
from benchmarks.reference_models.model import (
    Losses,
    State,
    Training,
    attention,
    initial_params,
    optimizer,
    token_losses,
    train_step,
)
from benchmarks.reference_models.recipes import SIZES, Size, hf_config
from benchmarks.reference_models.schedule import Clock, learning_rate
from benchmarks.reference_models.validation import COUNT, validate
from infinigen_jax.errors import InputError
from infinigen_jax.models import blueprint, config_from_hf

CHECKPOINT = "checkpoint.npz"
VALIDATIONS = 10  # parts of the training, each followed by a validation
QUICK_WINDOWS = 16  # windows of such a validation
IN_FLIGHT = 2  # steps in flight before the loop waits for the oldest
POINTS = 400  # approximate maximum number of points of the curve
VALIDATIONS_SHARE = 0.05  # maximum share of a given time
RESERVE = 15.0  # seconds after the last step, in addition to the last validation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a training.

    Attributes:
        deadline: time on `time.monotonic()` by which all is written; None: train on `tokens`.
    """

    size_name: str
    seed: int = 0
    deadline: float | None = None
    tokens: int
    learning_rate: float
    synthetic: float
    save_every: float = 120.0

    @property
    def size(self) -> Size:
        """The size with the changes of the command line."""
        return dataclasses.replace(
            SIZES[self.size_name],
            tokens=self.tokens,
            learning_rate=self.learning_rate,
            synthetic=self.synthetic,
        )


def train(settings: Settings, corpus: Corpus, out: Path, resume: bool) -> bool:
    """Train or resume, and write everything; return whether the training is complete.

    Raises:
        InputError: `out` holds a training already, or, with `resume`, none that fits.
    """
    out.mkdir(parents=True, exist_ok=True)
    if not resume and (out / CHECKPOINT).exists():
        raise InputError(f"--out {out}: holds a training; give --resume, or another folder")
    job = _Job(settings, corpus, out)
    if resume:
        job.restore()
    with _stopped_gently() as stopping:
        finished = job.run(stopping)
    if finished:
        job.finish()
    return finished


class _Job:
    def __init__(self, settings: Settings, corpus: Corpus, out: Path):
        self.settings, self.corpus, self.out = settings, corpus, out
        self.size = settings.size
        self.hf = hf_config(self.size, corpus.tokenizer.get_vocab_size())
        config = config_from_hf(self.hf)
        self.dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
        self.training = Training(
            blueprint(config, self.dtype), attention(self.dtype), self.size.remat, self.dtype
        )
        params = with_induction(initial_params(config, settings.seed), config, settings.seed)
        self.state = State(params, optimizer(self.size.weight_decay).init(params))
        self.parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        self.clock = Clock(settings.tokens)
        self.curve: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.validations_wanted = VALIDATIONS
        self.step = train_step(self.training, self.size.weight_decay)
        self.compiled: dict[tuple[int, ...], Callable[..., tuple[State, Losses]]] = {}
        self.losses = jax.jit(lambda params, tokens: token_losses(self.training, params, tokens))

    def run(self, stopping: Callable[[], bool]) -> bool:
        """Run steps until the clock has run out (True) or a signal stops it (False)."""
        batches = Batches(self.corpus, self.size, self.settings.seed)
        try:
            self._warm_up(batches)
            return self._steps(batches, stopping)
        finally:
            batches.close()

    def restore(self) -> None:
        """Load the state of a checkpoint."""
        path = self.out / CHECKPOINT
        saved = checkpoints.describe(path)
        for name, value in self._identity().items():
            if saved.get(name) != value:
                raise InputError(
                    f"{path}: made with {name} {saved.get(name)}, not {value}; give another --out"
                )
        self.state = checkpoints.restore(path, self.state)
        self.clock = Clock(**saved["clock"])
        self.curve, self.validations = saved["curve"], saved["validations"]

    def save(self) -> None:
        """Save the state as a checkpoint."""
        described = {
            "clock": dataclasses.asdict(self.clock),
            "curve": self.curve,
            "validations": self.validations,
        }
        checkpoints.save(self.out / CHECKPOINT, self.state, self._identity() | described)

    def finish(self) -> None:
        """Export, validate, write and draw the curve, and save the last state."""
        export(self.out / "model", self.hf, self.state.params, self.corpus.tokenizer_json)
        final = self.validate(COUNT)
        note(f"validation: {final['nats_per_token']:.4f} nats per token")
        c = self.clock
        result = {
            **{k: v for k, v in self._identity().items() if k != "corpus"},
            "machine": describe(),
            "parameters": self.parameters,
            "steps": c.step,
            "tokens": c.seen,
            "seconds": c.seconds,
            "tokens_per_second": c.seen / c.seconds if c.seconds else None,
            "validation": final,
            "curve": self.curve,
            "validations": self.validations,
        }
        write_json(self.out / "loss.json", result)
        if importlib.util.find_spec("matplotlib"):
            from benchmarks.pictures import losses

            losses(result, self.out / "loss.svg")
        self.save()

    def validate(self, count: int) -> dict[str, Any]:
        """Validate on `count` windows."""
        batch = max(1, self.size.stages[-1].batch)
        losses = lambda tokens: self.losses(self.state.params, tokens)  # noqa: E731
        return validate(losses, self.corpus.val, self.size.context, count, batch)

    def _steps(self, batches: Batches, stopping: Callable[[], bool]) -> bool:
        clock, size = self.clock, self.size
        flight: deque[tuple[dict[str, Any], Losses]] = deque()
        pending: list[tuple[dict[str, Any], Losses]] = []
        saved = now = time.monotonic()
        before = clock.seconds
        validated = int(clock.progress * self.validations_wanted)
        while clock.progress < 1 and not stopping():
            progress = clock.progress
            stage = size.stage(progress)
            rate = learning_rate(progress, size)
            self.state, losses = self._call(batches.get(clock.step, stage), rate)
            clock.step += 1
            clock.seen += stage.batch * stage.context
            flight.append(({"step": clock.step, "tokens": clock.seen, "rate": rate}, losses))
            if len(flight) > IN_FLIGHT:
                jax.block_until_ready(flight[0][1])
                pending.append(flight.popleft())
            clock.seconds = before + time.monotonic() - now
            if clock.progress < 1 and clock.progress >= (validated + 1) / self.validations_wanted:
                validated = int(clock.progress * self.validations_wanted)
                pending += flight
                flight.clear()
                self._point(pending)
                quick = self.validate(QUICK_WINDOWS)
                self.validations.append(self.curve[-1] | {"val": quick["nats_per_token"]})
                note(f"{clock.progress:4.0%} validation {quick['nats_per_token']:.4f}")
            elif len(pending) >= self._every():
                self._point(pending)
            if time.monotonic() - saved > self.settings.save_every:
                self.save()
                saved = time.monotonic()
        pending += flight
        self._point(pending)
        clock.seconds = before + time.monotonic() - now
        self.save()
        return clock.progress >= 1

    def _call(self, batch: Batch, rate: float) -> tuple[State, Losses]:
        return self.compiled[batch.tokens.shape](self.state, *batch, np.float32(rate))

    def _warm_up(self, batches: Batches) -> None:
        """Compile before the clock starts, then set the time for the training."""
        begun = time.monotonic()
        for stage in self.size.stages:
            batch = batches.make(0, stage)
            if stage.until > self.clock.progress and batch.tokens.shape not in self.compiled:
                self._compile(batch)
        start = time.monotonic()
        if self.clock.progress < 1:
            self.validate(QUICK_WINDOWS)
        once = time.monotonic()
        if self.settings.deadline is not None and self.clock.progress < 1:
            self.validate(QUICK_WINDOWS)  # already compiled
            again = time.monotonic() - once
            left = self.settings.deadline - time.monotonic() - RESERVE
            left -= again * COUNT / QUICK_WINDOWS
            if left <= 0:
                raise InputError("--minutes: nothing is left of them for the training; give more")
            self.clock.end_in(left)
            affordable = int(VALIDATIONS_SHARE * left / max(again, 1e-9))
            self.validations_wanted = min(VALIDATIONS, max(affordable, 1))
        note(f"compiled in {start - begun:.0f} s; {self.parameters:,} parameters")

    def _compile(self, batch: Batch) -> None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.state)
        rate = jax.ShapeDtypeStruct((), jnp.float32)
        self.compiled[batch.tokens.shape] = self.step.lower(shapes, *batch, rate).compile()

    def _every(self) -> int:
        """Return the steps per point of the curve, from the expected number of steps."""
        done = max(self.clock.progress, 0.01)
        return max(1, int(self.clock.step / done / POINTS))

    def _point(self, pending: list[tuple[dict[str, Any], Losses]]) -> None:
        """Add a point to the curve, the mean over the steps since the last point."""
        if not pending:
            return
        values = np.array([[float(x) for x in losses] for _, losses in pending])
        names = ("books", "answers", "gradient")
        means = {}
        for i, name in enumerate(names):
            positive = values[:, i][values[:, i] > 0]
            if len(positive):
                means[name] = round(float(positive.mean()), 5)
        if not np.isfinite(values).all():
            raise InputError("--learning-rate: the loss is not finite any more; give a lower one")
        self.curve.append(pending[-1][0] | {"seconds": round(self.clock.seconds, 2)} | means)
        pending.clear()
        if len(self.curve) % 10 == 0:
            losses = ", ".join(f"{k} {v:.3f}" for k, v in means.items())
            speed = self.clock.seen / max(self.clock.seconds, 1e-9)
            note(f"{self.clock.progress:4.0%} step {self.clock.step}: {losses}; {speed:,.0f}/s")

    def _identity(self) -> dict[str, Any]:
        """Return the settings that a checkpoint must match for a training to resume."""
        recipe = dataclasses.asdict(self.size)
        if self.settings.deadline is not None:
            del recipe["tokens"]  # the training ends by time
        return {
            "size": self.settings.size_name,
            "seed": self.settings.seed,
            "by_time": self.settings.deadline is not None,
            "compute": jnp.dtype(self.dtype).name,
            "corpus": self.corpus.fingerprint,
            "recipe": json.loads(json.dumps(recipe)),
        }


@contextlib.contextmanager
def _stopped_gently() -> Iterator[Callable[[], bool]]:
    """Let SIGINT and SIGTERM end the training after the current step; a second one ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    seen = threading.Event()

    def stop(signal_number: int, frame: object) -> None:
        if seen.is_set():
            raise KeyboardInterrupt
        seen.set()
        note("stopping: the state is saved, --resume continues")

    previous = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen.is_set
    finally:
        for signal_number, handler in previous.items():
            signal.signal(signal_number, handler)
