"""Results that a generation returns."""

import dataclasses
from typing import NamedTuple

import numpy as np

from infinigen_jax.engine.stats import Stats
from infinigen_jax.sampling import LogProbs


class Choice(NamedTuple):
    """A drawn token's place in the model's distribution, before penalties and temperature.

    Attributes:
        log_prob: natural log-probability of the token.
        top: the likeliest tokens with their log-probabilities, descending.
    """

    log_prob: float
    top: list[tuple[int, float]]


def choices_of(log_probs: LogProbs, alternatives: int) -> list[Choice]:
    """Return the choice of each sequence, with the given number of likeliest tokens."""
    drawn, top, tokens = (np.asarray(array) for array in log_probs)
    pairs = top[:, :alternatives].tolist(), tokens[:, :alternatives].tolist()
    return [
        Choice(log_prob, list(zip(tokens, top, strict=True)))
        for log_prob, top, tokens in zip(drawn.tolist(), *pairs, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Step:
    """Tokens of one decode step.

    Attributes:
        tokens: new token of each prompt; None if it has ended or not begun yet.
        texts: text completed by the new tokens, possibly empty. Empty strings for a model without
            a tokenizer.
        log_probs: choice of each new token, if asked for.
    """

    tokens: list[int | None]
    texts: list[str]
    log_probs: list[Choice | None] | None = None


@dataclasses.dataclass(frozen=True)
class Generation:
    """Result of `Engine.generate`.

    Attributes:
        tokens, texts: new tokens and text of each prompt.
        stats: statistics of the run.
        log_probs: choice of each new token, per prompt; empty lists unless asked for.
    """

    tokens: list[list[int]]
    texts: list[str]
    stats: Stats
    log_probs: list[list[Choice]] = dataclasses.field(default_factory=list)
