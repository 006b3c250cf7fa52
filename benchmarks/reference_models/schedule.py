"""How far a training is, and the learning rate there.

Progress runs from 0 to 1, in tokens or in time. Counted in time it reaches 1 when the time is over,
however fast the machine turns out to be, so that the cosine always comes to its end.
"""

import dataclasses
import math

from benchmarks.reference_models.recipes import Size

FLOOR = 0.02  # of the peak, at the end
OWN_WARMUP = 0.1  # of a stage that has its own rate


@dataclasses.dataclass
class Clock:
    """What a training has behind it.

    Attributes:
        tokens: to train on; without meaning where time is given.
        step, seen, seconds: steps taken, tokens in them, and the time they took.
        limit: seconds that the rest of the training may take, counted from `limited_at` on, when
            the progress was `base`; None: the training ends by tokens.
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
        if self.limit is None:
            return min(self.seen / self.tokens, 1.0)
        gone = (self.seconds - self.limited_at) / self.limit
        return min(self.base + (1 - self.base) * gone, 1.0)

    def end_in(self, seconds: float) -> None:
        """Spread the rest of the training over so many seconds; its progress goes on from here."""
        self.base, self.limited_at, self.limit = self.progress, self.seconds, seconds


def learning_rate(progress: float, size: Size) -> float:
    """Linear to the peak during the warm-up, then half a cosine down to a fiftieth of it.

    From the end of the last stage that has a rate of its own; those warm up for a tenth of it.
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
