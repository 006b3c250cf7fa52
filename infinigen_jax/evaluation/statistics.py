"""Means, standard errors and paired differences of token scores."""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

Nats = Float[np.ndarray, "w t"]


class Compared(NamedTuple):
    """Predictions compared with the full cache's; `same` is 1 for an equal best token, else 0."""

    nats: Nats
    divergence: Nats
    same: Nats


def statistics(nats: Nats, compared: Compared | None, context: int, chunk: int) -> dict[str, Any]:
    """Return perplexity, whole and by position from `context`, and its change from a reference."""

    def part(start: int, end: int) -> dict[str, Any]:
        part_compared = None if compared is None else Compared(*(x[:, start:end] for x in compared))
        return _mean(nats[:, start:end], part_compared)

    total = nats.shape[1]
    ends = [(start, min(start + chunk, total)) for start in range(0, total, chunk)]
    chunks = [{"from": context + a, "to": context + b} | part(a, b) for a, b in ends]
    # Makes any two lines of a result comparable window by window.
    windows = [round(float(mean), 7) for mean in nats.mean(axis=1)]
    return part(0, total) | {"chunks": chunks, "window_nats": windows}


def _mean(nats: Nats, compared: Compared | None) -> dict[str, Any]:
    """Return means over all tokens, with errors over windows, whose tokens are dependent."""
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
    """Return the Kullback-Leibler divergence from a reference to another distribution, in nats.

    The sum is over n tokens and one token that stands for all others. It is at most the divergence
    over all tokens, and close to it if the reference considers the n tokens likely. The result is
    float64 and at least 0.
    """
    p, q = (np.exp(x.astype(np.float64)) for x in (reference, other))
    log_ratio = reference.astype(np.float64) - other
    # p log(p / q) + (q - p) is not negative; the second term sums to zero over all tokens.
    known = np.sum(p * log_ratio + (q - p), axis=-1)
    # Bound the remaining probability by the rounding of float32 sums.
    p, q = (np.maximum(1 - x.sum(axis=-1), 1e-6) for x in (p, q))
    return np.maximum(known + p * np.log(p / q) + (q - p), 0)


def standard_error(nats: Nats) -> float | None:
    """Return the error of the mean from the windows' means; None for a single window."""
    return mean_and_error(nats.mean(axis=1))[1]


def mean_and_error(samples: Float[np.ndarray, " w"]) -> tuple[float, float | None]:
    """Return the mean of independent samples and its standard error, None for a single one."""
    if len(samples) < 2:
        return float(samples.mean()), None
    return float(samples.mean()), float(samples.std(ddof=1) / math.sqrt(len(samples)))


def perplexity(nats: float) -> float | None:
    """Return exp(nats); None if it overflows, because JSON has no infinity."""
    return math.exp(nats) if nats < 700 else None
