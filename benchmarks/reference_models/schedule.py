"""Progress of a training, and the learning rate as a function of it.

Progress runs from 0 to 1, in tokens or in time. In time it reaches 1 when the time is over,
whatever the speed of the machine, so the cosine always completes.
"""

import dataclasses
import math

from benchmarks.reference_models.recipes import Size

FLOOR = 0.02  # final learning rate, as a share of the peak
OWN_WARMUP = 0.1  # warm-up share of a stage with its own rate


@dataclasses.dataclass
class Clock:
    """Tokens, steps and seconds of a training so far.

    Attributes:
        tokens: tokens to train on; unused if a time is given.
        step, seen, seconds: steps so far, their tokens, and their time.
        limit: seconds for the rest of the training, counted from `limited_at`, when the progress
            was `base`; None: the training ends by tokens.
    """

    tokens: int
    step: int = 0
    seen: int = 0
    seconds: float = 0.0
    limit: float | None = None
    limited_at: float = 0.0
    base: float = 0.0

    @property
    def progress(self) -> float:
        """Progress of the training, from 0 to 1."""
        if self.limit is None:
            return min(self.seen / self.tokens, 1.0)
        gone = (self.seconds - self.limited_at) / self.limit
        return min(self.base + (1 - self.base) * gone, 1.0)

    def end_in(self, seconds: float) -> None:
        """Spread the rest of the training over `seconds`; its progress continues from here."""
        self.base, self.limited_at, self.limit = self.progress, self.seconds, seconds


def learning_rate(progress: float, size: Size) -> float:
    """Return a linear warm-up to the peak, followed by half a cosine down to a fiftieth of it.

    It starts after the last stage with its own rate, whose warm-up is a tenth of the stage.
    """
    stage, begin = size.stage(progress), size.rises_from
    if stage.rate is not None:
        return stage.rate * min(1.0, progress / (OWN_WARMUP * stage.until))
    peak, warmup = size.learning_rate, size.warmup
    progress = (progress - begin) / (1 - begin)
    if progress < warmup:
        return peak * progress / warmup
    fallen = min((progress - warmup) / (1 - warmup), 1.0)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * fallen)))
