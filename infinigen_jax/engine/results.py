"""Results that a generation returns."""

import dataclasses

from infinigen_jax.engine.stats import Stats


@dataclasses.dataclass(frozen=True)
class Step:
    """Tokens of one decode step.

    Attributes:
        tokens: new token of each prompt; None if it has ended or not begun yet.
        texts: text completed by the new tokens, possibly empty. Empty strings for a model without
            a tokenizer.
    """

    tokens: list[int | None]
    texts: list[str]


@dataclasses.dataclass(frozen=True)
class Generation:
    """Result of `Engine.generate`: new tokens and text of each prompt, and the statistics."""

    tokens: list[list[int]]
    texts: list[str]
    stats: Stats
