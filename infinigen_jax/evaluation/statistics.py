"""Means, standard errors and paired differences of token scores."""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

Nats = Float[np.ndarray, "w t"]


class Compared(NamedTuple):
    """Predictions beside those of the full cache for the same tokens.

    Attributes:
        nats: the full cache's.
        divergence: see `divergence`.
        same: whether the likeliest token is the same, 0 or 1.
    """

    nats: Nats
    divergence: Nats
    same: Nats


def statistics(nats: Nats, compared: Compared | None, context: int, chunk: int) -> dict[str, Any]:
    """Perplexity, whole and by position, and how far it is from a reference.

    Args:
        nats: [w, t] of each scored token; their positions in the window count from `context`.
        compared: the same tokens beside the full cache's.
    """

    def part(start: int, end: int) -> dict[str, Any]:
        beside = None if compared is None else Compared(*(x[:, start:end] for x in compared))
        return _mean(nats[:, start:end], beside)

    total = nats.shape[1]
    ends = [(start, min(start + chunk, total)) for start in range(0, total, chunk)]
    chunks = [{"from": context + a, "to": context + b} | part(a, b) for a, b in ends]
    # So that any two lines of a result can be compared window by window.
    windows = [round(float(mean), 7) for mean in nats.mean(axis=1)]
    return part(0, total) | {"chunks": chunks, "window_nats": windows}


def _mean(nats: Nats, compared: Compared | None) -> dict[str, Any]:
    """Means over all tokens; errors over windows, for the tokens of one are not independent."""
    mean = float(nats.mean())
    result = {
        "tokens": nats.size,
        "nats_per_token": mean,
        "standard_error": standard_error(nats),
        "perplexity": perplexity(mean),
        "difference_nats": None,
        "difference_standard_error": None,
        "perplexity_change_percent": None,
        "divergence_nats": None,
        "divergence_standard_error": None,
        "same_best_fraction": None,
    }
    if compared is not None:
        difference = nats - compared.nats
        change = float(difference.mean())
        ratio = perplexity(change)
        result |= {
            "difference_nats": change,
            "difference_standard_error": standard_error(difference),
            "perplexity_change_percent": None if ratio is None else 100 * (ratio - 1),
            "divergence_nats": float(compared.divergence.mean()),
            "divergence_standard_error": standard_error(compared.divergence),
            "same_best_fraction": float(compared.same.mean()),
        }
    return result


def divergence(
    reference: Float[np.ndarray, "*w t n"], other: Float[np.ndarray, "*w t n"]
) -> Float[np.ndarray, "*w t"]:
    """Kullback-Leibler divergence from a reference's distribution to another one, in nats.

    Over n tokens and, as if it were one token, all the rest: at most what it is over all tokens
    apart, and nearly that if the n are what the reference holds likely.

    Args:
        reference, other: natural log-probabilities of the same n tokens.

    Returns:
        float64, not negative: 0 where the two are equal.
    """
    p, q = (np.exp(x.astype(np.float64)) for x in (reference, other))
    apart = reference.astype(np.float64) - other
    # p log(p / q) + (q - p), not negative; the latter is nothing over all tokens together.
    known = np.sum(p * apart + (q - p), axis=-1)
    # Never nothing: what sums of float32 leave over is no more than their rounding.
    p, q = (np.maximum(1 - x.sum(axis=-1), 1e-6) for x in (p, q))
    return np.maximum(known + p * np.log(p / q) + (q - p), 0)


def standard_error(nats: Nats) -> float | None:
    """Of the mean, from the windows' own means; None for a single window."""
    return mean_and_error(nats.mean(axis=1))[1]


def mean_and_error(samples: Float[np.ndarray, " w"]) -> tuple[float, float | None]:
    """Mean of independent samples, and its standard error; None for a single one."""
    if len(samples) < 2:
        return float(samples.mean()), None
    return float(samples.mean()), float(samples.std(ddof=1) / math.sqrt(len(samples)))


def perplexity(nats: float) -> float | None:
    """exp; None, as JSON has no infinity, where it overflows."""
    return math.exp(nats) if nats < 700 else None
