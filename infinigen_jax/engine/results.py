"""What a generation gives its caller."""

import dataclasses

from infinigen_jax.engine.stats import Stats


@dataclasses.dataclass(frozen=True)
class Step:
    """One token of every sequence.

    Attributes:
        tokens: the new token of each prompt; None for one that has ended or not begun yet.
        texts: the text that the new tokens complete, possibly empty; empty strings for a model
            without a tokenizer.
    """

    tokens: list[int | None]
    texts: list[str]


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of `Engine.generate`: new tokens and text of each prompt, and the stats."""

    tokens: list[list[int]]
    texts: list[str]
    stats: Stats
