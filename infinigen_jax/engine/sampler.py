"""Draws of a batch's next tokens: one program for all settings, and none for a greedy batch."""

import collections
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from infinigen_jax.cache.host_array import Placement
from infinigen_jax.engine.batching import put_sequence, take_sequence
from infinigen_jax.programs.program import Program
from infinigen_jax.sampling import (
    History,
    LogProbs,
    SamplingArrays,
    limited,
    log_probs_of,
    sample,
    settings_of,
    uniforms,
)
from infinigen_jax.settings.sampling import MOST_LOG_PROBS, Sampling


class Drawn(NamedTuple):
    """Tokens of one step."""

    tokens: Int[Array, " b"]
    log_probs: LogProbs | None


class Draws(NamedTuple):
    """Inputs of a sampler's draws, except the logits; `history` is None without penalties."""

    settings: SamplingArrays
    stream: Int[Array, " b"]
    count: Int[Array, " b"]
    history: History | None


class Sampler:
    """Sampling of a batch's sequences.

    The draws of a sequence depend on its settings and number of draws, not on the other sequences.
    Settings are data. Three kinds of batches have programs of their own: greedy ones, which take
    the step's most likely tokens as they are, others, and those with penalties.

    Args:
        prompts: tokens of each sequence so far, for the repetition penalty.
        streams: stream of random numbers of each sequence; 0 by default, see `sampling.uniforms`.
        greedy, penalises: whether all sequences that may join are greedy, and whether one of them
            has penalties; they count for the kind of the batch from the beginning, so that it never
            changes.
    """

    def __init__(
        self,
        mesh: Mesh,
        vocabulary: int,
        samplings: Sequence[Sampling],
        prompts: Sequence[Sequence[int]],
        streams: Sequence[int] | None = None,
        drawn: int = 0,
        greedy: bool = True,
        penalises: bool = False,
    ):
        self._at, self._programs = Placement(mesh), sampling_programs(mesh)
        self._others = greedy, penalises
        self._vocabulary, self._sampling = vocabulary, list(samplings)
        self._streams = np.array(streams or [0] * len(self._sampling), np.int32)
        self._steps = np.full(len(self._sampling), drawn, np.int32)
        self._history: History | None = None
        if self._penalises:
            self._history = self._put(self._empty_history(prompts))
        self._place()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token of every sequence is taken."""
        greedy = self._others[0] and all(sampling.greedy for sampling in self._sampling)
        return greedy and not self._penalises

    @property
    def _penalises(self) -> bool:
        return self._others[1] or any(sampling.penalises for sampling in self._sampling)

    def draw(
        self,
        logits: Float[Array, "b v"],
        best: Int[Array, " b"],
        allowed: np.ndarray | None = None,
        *,
        log_probs: bool = False,
    ) -> Drawn:
        """Draw the next token of each sequence, without waiting.

        `allowed` marks the tokens that may be drawn, see `sampling.limited`; None for all.
        """
        limited, tokens = logits, best
        if allowed is not None:
            limited, tokens = self._programs.limit(logits, best, self._put(allowed))
        if not self.greedy:
            tokens, self._count, self._history = self._programs.draw(
                limited, self._settings, self._stream, self._count, self._history
            )
        self._steps += 1
        return Drawn(tokens, self.log_probs(logits, tokens) if log_probs else None)

    @property
    def draws(self) -> Draws | None:
        """Inputs of the next draws; None while all sequences are greedy."""
        if self.greedy:
            return None
        return Draws(self._settings, self._stream, self._count, self._history)

    def drew(self, draws: Draws | None, counts: np.ndarray) -> None:
        """Continue after `counts` tokens of each sequence that were drawn elsewhere."""
        self._steps += counts
        if draws is not None:
            self._count, self._history = draws.count, draws.history

    def log_probs(self, logits: Float[Array, "n v"], tokens: Int[Array, " n"]) -> LogProbs:
        """Return the log-probabilities of drawn tokens."""
        return self._programs.log_probs(logits, tokens)

    def replace(self, sequence: int, other: "Sampler") -> None:
        """Replace a sequence by the only one of another sampler."""
        self._sampling[sequence] = other._sampling[0]
        self._streams[sequence], self._steps[sequence] = other._streams[0], other._steps[0]
        if self._history is None and other._history is not None:
            self._history = self._put(self._empty_history([()] * len(self._sampling)))
        if self._history is not None:
            one = other._history or self._put(self._empty_history([()]))
            at = jax.device_put(np.int32(sequence), self._at.whole)
            self._history = self._programs.put(self._history, one, at)
        self._place()

    def single(self, sequence: int) -> "Sampler":
        """Return a sampler that continues a sequence alone."""
        stream, drawn = int(self._streams[sequence]), int(self._steps[sequence])
        sampling = [self._sampling[sequence]]
        fixed = self._at.mesh, self._vocabulary
        one = Sampler(*fixed, sampling, [()], [stream], drawn, *self._others)
        if one._history is not None:
            at = jax.device_put(np.int32(sequence), self._at.whole)
            one._history = self._programs.take(self._history, at)
        return one

    def leave(self, sequence: int) -> None:
        """Forget the settings of a sequence that has ended."""
        self._sampling[sequence] = Sampling()
        if not self._penalises:
            self._history = None

    def _place(self) -> None:
        """Copy the settings of all sequences to the device."""
        self._settings = self._put(settings_of(self._sampling))
        # Copies, because the transfer may still read them when the originals change.
        self._stream, self._count = self._put((self._streams.copy(), self._steps.copy()))

    def _empty_history(self, prompts: Sequence[Sequence[int]]) -> History:
        prompt = np.zeros((len(prompts), self._vocabulary), bool)
        for mask, tokens in zip(prompt, prompts, strict=True):
            mask[np.asarray(tokens, np.int32)] = True
        return History(prompt, np.zeros(prompt.shape, np.int32))  # pyright: ignore

    def _put(self, arrays: Any) -> Any:
        return jax.device_put(arrays, self._at.batch, may_alias=False)


class SamplingPrograms(NamedTuple):
    """Compiled functions of `Sampler`; `draw` also counts the tokens in the donated history."""

    limit: Any
    draw: Any
    log_probs: Any
    put: Any
    take: Any


@functools.lru_cache(maxsize=8)
def sampling_programs(mesh: Mesh) -> SamplingPrograms:
    """Return the compiled functions for batches on a mesh."""

    def draw(
        logits: Float[Array, "b v"],
        settings: SamplingArrays,
        stream: Int[Array, " b"],
        step: Int[Array, " b"],
        history: History | None,
    ) -> tuple[Int[Array, " b"], Int[Array, " b"], History | None]:
        tokens = sample(logits, settings, uniforms(settings.seed, stream, step), history)
        if history is not None:
            drawn = history.drawn.at[jnp.arange(len(tokens)), tokens].add(1)
            history = history._replace(drawn=drawn)
        return tokens, step + 1, history

    def log_probs(logits: Float[Array, "b v"], tokens: Int[Array, " b"]) -> LogProbs:
        return log_probs_of(logits, tokens, MOST_LOG_PROBS)

    at = Placement(mesh)
    return SamplingPrograms(
        limit=Program(limited, (), at.batch),
        draw=Program(draw, (), at.batch, donate_argnums=4),
        log_probs=Program(log_probs, (), at.batch),
        put=Program(put_sequence, (), at.batch, donate_argnums=0),
        take=Program(take_sequence, (), at.batch),
    )


def repetitions(prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]) -> list[int]:
    """Return the number of equal prompts with equal settings before each, to draw differently."""
    counts: collections.Counter[Any] = collections.Counter()
    numbers = []
    for prompt, settings in zip(prompts, sampling, strict=True):
        numbers.append(counts[tuple(prompt), settings])
        counts[tuple(prompt), settings] += 1
    return numbers
