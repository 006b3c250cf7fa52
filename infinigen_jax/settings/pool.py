"""Limit of the host cache (section 4.4 of the paper); `cache.pool` implements it."""

import dataclasses
from fractions import Fraction
from typing import Any, ClassVar

from infinigen_jax.errors import InputError, ParameterError
from infinigen_jax.numeric import SHARE, OneOf, Range, whole_number
from infinigen_jax.settings.setting import Settings, setting

POOL_EVICTIONS = ("fifo", "lru", "counter")
ALL = "all"  # text of no limit


class Limit(Range):
    """Type of an option: tokens, such as 2048 or 2k; or a share, such as 80%; or all."""

    def parse(self, text: str) -> int | float | str:
        return float(text[:-1]) / 100 if text.endswith("%") else super().parse(text)

    def problem(self, value: Any) -> str:
        if value == ALL:
            return ""
        if isinstance(value, str):
            return "give a number of tokens, a share such as 80%, or all"
        return SHARE.problem(value) if isinstance(value, float) else super().problem(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool(Settings):
    """Limit of the host cache, in tokens or as a share, and the order of eviction.

    Sinks that the policy keeps on the device take no slot and do not count. Without `recent`, new
    rows, whose counter is 0, would be evicted first.

    Raises:
        InputError: for invalid values.
    """

    room: ClassVar[str] = "pool."

    tokens: int | None = setting(
        None,
        "maximum number of rows on the host per layer, sequence and KV head: a number, or a share "
        "of the context such as 80%; all (default): no limit",
        "N",
        whole_number(1),
    )
    share: float | None = setting(
        None,
        "alternative to tokens: share of the longest sequence's tokens, at least the recent window",
        "S",
        SHARE,
    )
    eviction: str = setting(
        "counter",
        "order in which a full pool evicts rows: fifo, lru or counter",
        "E",
        OneOf(POOL_EVICTIONS),
    )
    sinks: int = setting(
        4, "first tokens that a pool never evicts; 0 in the paper", "N", whole_number(0)
    )
    recent: float = setting(
        0.5, "share of the slots whose most recent rows are not evicted", "R", Range(0, 1)
    )

    def __post_init__(self):
        super().__post_init__()
        if (self.tokens is None) == (self.share is None):
            raise InputError("a pool needs a limit: either tokens or a share")
        if self.recent == 1:
            raise ParameterError("pool.recent", "it must be below 1", 1)

    @property
    def use_bytes(self) -> int:
        """Bytes of a row's entry in `used`."""
        return {"fifo": 0, "lru": 4, "counter": 1}[self.eviction]

    @property
    def label(self) -> str:
        """Limit, eviction order, and other settings that differ from their defaults."""
        others = {"sinks": self.sinks, "recent": self.recent}
        others = {name: value for name, value in others.items() if value != getattr(Pool, name)}
        return " ".join(
            [self.limit, self.eviction, *(f"{name} {value:g}" for name, value in others.items())]
        )

    @property
    def limit(self) -> str:
        """Limit as written on the command line."""
        return f"{100 * self.share:g}%" if self.share is not None else str(self.tokens)

    def slots(self, tokens: int, sinks: int, window: int) -> int:
        """Return the number of slots for a run."""
        least = min(tokens, window + max(0, self.sinks - sinks))
        if self.share is not None:  # of few tokens it is too small
            return max(least, int(Fraction(self.share).limit_denominator(10**6) * tokens))
        assert self.tokens is not None
        slots = min(self.tokens, tokens)
        if slots < least:
            raise ParameterError(
                "pool.tokens",
                f"{slots} rows of {tokens} tokens are too few for a window of {window} recent "
                f"tokens; use at least {least}",
                self.limit,
            )
        return slots
