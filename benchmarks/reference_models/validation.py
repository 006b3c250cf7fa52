"""Nats per token on held-out books.

Windows of a whole context are evenly spread over the first 200,000 characters of each book and may
begin anywhere, like those of the published figures of the shared checkpoints.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.reference_models.batches import windows
from benchmarks.reference_models.corpus import Tokens

COUNT = 48
PARTS = 4  # parts of a window, reported separately


def validate(
    losses: Callable[[np.ndarray], Any], split: Tokens, context: int, count: int, batch: int
) -> dict[str, Any]:
    """Return mean nats per token, whole and by position, and per character.

    Args:
        losses: returns nats [b, n - 1] of windows [b, n]; called with equal shapes.
        count: number of windows.
    """
    cut = windows(split, context, count)
    batch = min(batch, len(cut))
    padded = np.concatenate([cut, cut[: -len(cut) % batch]])
    nats = np.concatenate(
        [np.asarray(losses(padded[i : i + batch])) for i in range(0, len(padded), batch)]
    )[: len(cut)]
    ends = np.linspace(0, context - 1, PARTS + 1).astype(int)
    mean = float(nats.mean())
    return {
        "windows": len(cut),
        "context": context,
        "nats_per_token": mean,
        "standard_error": float(nats.mean(axis=1).std() / max(len(cut) - 1, 1) ** 0.5),
        "nats_per_character": mean * len(split.tokens) / split.characters,
        "characters_per_token": split.characters / len(split.tokens),
        "by_position": [
            {"to": int(b) + 1, "nats_per_token": float(nats[:, a:b].mean())}
            for a, b in zip(ends, ends[1:], strict=False)
        ],
    }
