"""Forecast of the lossless mode's time, from the times of its two kinds of step."""

import dataclasses

from infinigen_jax.engine.draft_length import START, DraftLength

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


def forecast_rounds(draft: float, verification: float, most: int) -> Rounds:
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
