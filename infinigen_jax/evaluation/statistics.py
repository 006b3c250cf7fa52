"""Means, standard errors and paired differences of token scores."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float

Nats = Float[np.ndarray, "w t"]


def statistics(nats: Nats, reference: Nats | None, context: int, chunk: int) -> dict[str, Any]:
    """Perplexity, whole and by position, and the paired difference to a reference.

    Args:
        nats: [w, t] of each scored token; their positions in the window count from `context`.
        reference: the same tokens' with the full cache.
    """

    def part(start: int, end: int) -> dict[str, Any]:
        compared = None if reference is None else reference[:, start:end]
        return _mean(nats[:, start:end], compared)

    total = nats.shape[1]
    ends = [(start, min(start + chunk, total)) for start in range(0, total, chunk)]
    chunks = [{"from": context + a, "to": context + b} | part(a, b) for a, b in ends]
    return part(0, total) | {"chunks": chunks}


def _mean(nats: Nats, reference: Nats | None) -> dict[str, Any]:
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
    }
    if reference is not None:
        difference = nats - reference
        change = float(difference.mean())
        result["difference_nats"] = change
        result["difference_standard_error"] = standard_error(difference)
        ratio = perplexity(change)
        result["perplexity_change_percent"] = None if ratio is None else 100 * (ratio - 1)
    return result


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
