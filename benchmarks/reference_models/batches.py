"""Batches of the training, and windows of the validation.

A batch depends only on the seed, the step and the stage, so an interrupted training resumes from
the step alone.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from benchmarks.reference_models.corpus import Corpus, Tokens
from benchmarks.reference_models.recipes import BOS, Size, Stage
from benchmarks.reference_models.synthetic import SHORTEST, Synthetic

AHEAD = 4  # batches prepared while a step runs


class Batch(NamedTuple):
    """tokens [b, s + 1] int32; weights of the targets [b, s]; which targets are answers [b, s]."""

    tokens: np.ndarray
    weights: np.ndarray
    answers: np.ndarray


def passage(split: Tokens, rng: np.random.Generator, length: int) -> np.ndarray:
    """Return consecutive tokens, from one book if a book is long enough."""
    tokens, starts = split.tokens, split.starts
    if len(tokens) <= length:
        return np.resize(np.asarray(tokens), length)
    start = int(rng.integers(0, len(tokens) - length))
    end = int(starts[np.searchsorted(starts, start, side="right")])
    begin = int(starts[np.searchsorted(starts, start, side="right") - 1])
    if start + length > end:
        start = max(end - length, begin)
    start = min(start, len(tokens) - length)
    return np.asarray(tokens[start : start + length])


class Batches:
    """Draws batches; a thread prepares the next ones."""

    def __init__(self, corpus: Corpus, size: Size, seed: int):
        self.corpus, self.size, self.seed = corpus, size, seed
        self.synthetic = Synthetic(
            corpus.tokenizer, lambda rng, n: passage(corpus.train, rng, n), size.answer_weight
        )
        self._executor = ThreadPoolExecutor(1)
        self._made: dict[tuple[int, Stage], Future[Batch]] = {}

    def get(self, step: int, stage: Stage) -> Batch:
        """Return the batch of a step; start those of the next steps, assuming the same stage."""
        pending = self._made.pop((step, stage), None)
        batch = pending.result() if pending else self.make(step, stage)
        kept = [(step + i, stage) for i in range(1, AHEAD + 1)]  # the next one first
        for key in [key for key in self._made if key not in kept]:
            self._made.pop(key).cancel()
        for key in kept:
            if key not in self._made:
                self._made[key] = self._executor.submit(self.make, *key)
        return batch

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)

    def make(self, step: int, stage: Stage) -> Batch:
        """Make passages of books, half of them after a beginning-of-sequence token, and tasks."""
        rng = np.random.default_rng([self.seed, step])
        length = stage.context + 1
        tokens = np.empty((stage.batch, length), np.int32)
        weights = np.ones((stage.batch, length), np.float32)
        answers = np.zeros((stage.batch, length), bool)
        for row in range(stage.batch):
            sample = None
            if rng.random() < stage.copies:
                sample = self.synthetic.copies(rng, length)
            elif length >= SHORTEST and rng.random() < self.size.synthetic:
                sample = self.synthetic.draw(rng, length)
            if sample is not None:
                tokens[row], weights[row] = sample.tokens, sample.weights
                for lookup in sample.lookups:
                    answers[row, lookup.start : lookup.stop] = True
            else:
                tokens[row] = passage(self.corpus.train, rng, length)
                if rng.random() < 0.5:  # like prompts; windows of a validation lack the token
                    tokens[row, 0] = BOS
        return Batch(tokens, weights[:, 1:], answers[:, 1:])


def windows(split: Tokens, context: int, count: int) -> np.ndarray:
    """Return at most `count` windows [w, context] int32, evenly spread over a split."""
    here = max(len(split.tokens) // context, 1)
    count = min(count, here)
    last = max(len(split.tokens) - context, 0)
    starts = np.linspace(0, last, count).astype(int)
    return np.stack([np.resize(split.tokens[s : s + context], context) for s in starts]).astype(
        np.int32
    )
