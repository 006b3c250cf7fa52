"""Draws of a batch's next tokens: one program, another with penalties, none if all are greedy."""

import collections
import functools
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from infinigen_jax.cache.host_array import Placement
from infinigen_jax.engine.batch import put_sequence, take_sequence
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
    """Inputs of a sampler's draws, except the logits.

    Attributes:
        stream: see `sampling.uniforms`.
        count: tokens drawn so far, except while all sequences are greedy.
        history: None without penalties.
    """

    settings: SamplingArrays
    stream: Int[Array, " b"]
    count: Int[Array, " b"]
    history: History | None

    def after(self, tokens: Int[Array, "b n"], drawn: Bool[Array, "b n"]) -> "Draws":
        """Return the inputs after tokens, of which those that are not `drawn` change nothing."""
        history, count = self.history, jnp.sum(drawn, axis=1, dtype=jnp.int32)
        if history is not None:
            sequence = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
            times = history.drawn.at[sequence, jnp.maximum(tokens, 0)].add(drawn.astype(jnp.int32))
            history = history._replace(drawn=times)
        return self._replace(count=self.count + count, history=history)


def draw(logits: Float[Array, "b v"], draws: Draws) -> tuple[Int[Array, " b"], Draws]:
    """Return the next tokens, and the inputs of the draws after them."""
    uniform = uniforms(draws.settings.seed, draws.stream, draws.count)
    tokens = sample(logits, draws.settings, uniform, draws.history)
    return tokens, draws.after(tokens[:, None], jnp.ones((len(tokens), 1), jnp.bool))


class Sampler:
    """Sampling of a batch's sequences.

    The draws of a sequence depend on its settings and number of draws, not on the other sequences.
    Settings are data. Three kinds of batches have programs of their own: greedy ones, which take
    the step's most likely tokens as they are, others, and those with penalties.

    Args:
        prompts: tokens of each sequence so far, for the repetition penalty.
        streams: stream of random numbers of each sequence; 0 by default, see `sampling.uniforms`.
        drawn: number of tokens that each sequence drew before.
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
        count: Any = np.full(len(samplings), drawn, np.int32)
        stream: Any = np.array(streams or np.zeros_like(count), np.int32)
        history = self._empty_history(prompts) if self._penalises else None
        self._draws = self._put(Draws(settings_of(samplings), stream, count, history))

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
            tokens, count, history = self._programs.draw(limited, *self._draws)
            self._draws = self._draws._replace(count=count, history=history)
        return Drawn(tokens, self.log_probs(logits, tokens) if log_probs else None)

    @property
    def draws(self) -> Draws | None:
        """Inputs of the next draws; None while all sequences are greedy."""
        return None if self.greedy else self._draws

    def drew(self, draws: Draws | None) -> None:
        """Continue after tokens that were drawn elsewhere, with `draws` after them."""
        self._draws = draws or self._draws

    def log_probs(self, logits: Float[Array, "n v"], tokens: Int[Array, " n"]) -> LogProbs:
        return self._programs.log_probs(logits, tokens)

    def replace(self, sequence: int, other: "Sampler") -> None:
        """Replace a sequence by the only one of another sampler."""
        self._sampling[sequence] = other._sampling[0]
        both = self._draws, other._draws
        if any(draws.history is not None for draws in both):
            both = self._with_history(), other._with_history()
        self._draws = self._programs.put(*both, np.int32(sequence))
        # Those of sequences that have ended become greedy, which searches no threshold.
        self._draws = self._draws._replace(settings=self._put(settings_of(self._sampling)))

    def single(self, sequence: int) -> "Sampler":
        """Return a sampler that continues a sequence alone."""
        stream = int(np.asarray(self._draws.stream)[sequence])
        drawn = int(np.asarray(self._draws.count)[sequence])
        fixed = self._at.mesh, self._vocabulary
        one = Sampler(*fixed, [self._sampling[sequence]], [()], [stream], drawn, *self._others)
        if one._draws.history is not None:
            history = self._programs.take(self._draws.history, np.int32(sequence))
            one._draws = one._draws._replace(history=history)
        return one

    def leave(self, sequence: int) -> None:
        """Forget the settings of a sequence that has ended."""
        self._sampling[sequence] = Sampling()
        if not self._penalises:
            self._draws = self._draws._replace(history=None)

    def _with_history(self) -> Draws:
        """Return the inputs of the next draws with a history, empty if there was none."""
        if self._draws.history is not None:
            return self._draws
        empty = self._empty_history([()] * len(self._sampling))
        return self._draws._replace(history=self._put(empty))

    def _empty_history(self, prompts: Sequence[Sequence[int]]) -> History:
        prompt = np.zeros((len(prompts), self._vocabulary), bool)
        for mask, tokens in zip(prompt, prompts, strict=True):
            mask[np.asarray(tokens, np.int32)] = True
        return History(prompt, np.zeros(prompt.shape, np.int32))  # pyright: ignore

    def _put(self, arrays: Any) -> Any:
        return jax.device_put(arrays, self._at.batch, may_alias=False)


@functools.lru_cache(maxsize=8)
def sampling_programs(mesh: Mesh) -> Any:
    """Return the compiled functions of `Sampler` for batches on a mesh."""

    def draw_next(
        logits: Float[Array, "b v"],
        settings: SamplingArrays,
        stream: Int[Array, " b"],
        count: Int[Array, " b"],
        history: History | None,
    ) -> tuple[Int[Array, " b"], Int[Array, " b"], History | None]:
        """Return the results of `draw` that are new; the history is donated."""
        tokens, draws = draw(logits, Draws(settings, stream, count, history))
        return tokens, draws.count, draws.history

    def log_probs(logits: Float[Array, "b v"], tokens: Int[Array, " b"]) -> LogProbs:
        return log_probs_of(logits, tokens, MOST_LOG_PROBS)

    at = Placement(mesh)
    return types.SimpleNamespace(
        limit=Program(limited, (), at.batch),
        draw=Program(draw_next, (), at.batch, donate_argnums=4),
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
