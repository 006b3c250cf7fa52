"""Forecast of the lossless mode's time, from the bytes that a round moves."""

import dataclasses

from infinigen_jax.engine.draft_length import MOST, START, DraftLength
from infinigen_jax.planner.traffic import Traffic

ACCEPTED = START  # assumed share of the drafted tokens that are accepted


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Lower bounds on times, without the time of computing.

    Attributes:
        drafted: tokens to draft before a verification; 0 if drafts do not pay.
        seconds: seconds per token of a sequence.
        full: the same of decoding with the full cache, from where it is.
    """

    drafted: int
    seconds: float
    full: float


def full_traffic(traffic: Traffic, host_rows: int) -> Traffic:
    """Return the traffic of a step, or of a verification, that reads all rows of the host.

    Args:
        host_rows: bytes of these rows.
    """
    return dataclasses.replace(traffic, index=0, attended=host_rows, link=host_rows)


def draft_traffic(traffic: Traffic, layers: int, copied: int) -> Traffic:
    """Return the traffic of a drafted step.

    Args:
        layers: bytes of the layers' weights.
        copied: bytes of their small copy on the device; 0 for none.
    """
    if not copied:
        return traffic
    return dataclasses.replace(traffic, weights=traffic.weights - layers + copied, brought=0)


def forecast_rounds(draft: float, verification: float, most: int = MOST) -> Rounds:
    """Return the best rounds if a share ACCEPTED of the drafted tokens is accepted.

    Args:
        draft: seconds of a drafted step.
        verification: seconds of a verification, as of a step with the full cache.
        most: most tokens of a draft.
    """
    length = DraftLength(most)
    length.time_draft(1, draft)
    for size in length.sizes:
        length.time_verification(size, verification)
    drafted = length.choose(most)
    return Rounds(drafted, 1 / length.rate(drafted), verification)
